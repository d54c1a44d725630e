//! The threads of the engine.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// Pools by process and size: threads do not survive a fork, so a child starts its own.
type Pools = HashMap<(u32, usize), Arc<ThreadPool>>;

/// How many threads may work on one call; 1 stays on the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads(usize);

impl Threads {
    /// At most `count` threads; 0 counts as 1.
    pub fn new(count: usize) -> Self {
        Threads(count.max(1))
    }

    /// Runs `work` inside a pool of this many threads, or on the caller's thread if there is but one or no pool can be
    /// started.
    pub fn run<R: Send>(self, work: impl FnOnce() -> R + Send) -> R {
        match self.pool() {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// Whether work is spread.
    pub fn are_many(self) -> bool {
        self.0 > 1
    }

    fn pool(self) -> Option<Arc<ThreadPool>> {
        static POOLS: OnceLock<Mutex<Pools>> = OnceLock::new();
        if !self.are_many() {
            return None;
        }
        let mut pools = POOLS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        let key = (std::process::id(), self.0);
        if let Some(pool) = pools.get(&key) {
            return Some(pool.clone());
        }
        let pool =
            ThreadPoolBuilder::new().num_threads(self.0).thread_name(|i| format!("gradclip-{i}")).build().ok()?;
        Some(pools.entry(key).or_insert(Arc::new(pool)).clone())
    }
}
