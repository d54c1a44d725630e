//! The threads of the engine.

use std::sync::{Arc, Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// Threads, and the process and number they were started for: threads do not survive a fork, so a child starts its own.
struct Pool {
    key: (u32, usize),
    threads: Arc<ThreadPool>,
}

/// Elements from which work is spread over threads.
const WORTH_A_THREAD: u64 = 64 * 1024;

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

    /// Whether work on so many elements is spread: with fewer, waking others takes longer.
    pub fn share(self, elements: u64) -> bool {
        self.are_many() && elements >= WORTH_A_THREAD
    }

    fn are_many(self) -> bool {
        self.0 > 1
    }

    /// The pool of this process, of the size asked for last: one of another size ends when its work is done.
    fn pool(self) -> Option<Arc<ThreadPool>> {
        static LAST: Mutex<Option<Pool>> = Mutex::new(None);
        if !self.are_many() {
            return None;
        }
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (std::process::id(), self.0);
        if let Some(known) = last.as_ref().filter(|known| known.key == key) {
            return Some(known.threads.clone());
        }
        let threads = ThreadPoolBuilder::new().num_threads(self.0).thread_name(|i| format!("gradclip-{i}"));
        let threads = Arc::new(threads.build().ok()?);
        let outdated = last.replace(Pool { key, threads: threads.clone() });
        // The threads of a forked process's parent do not exist here: nothing would answer their end.
        if let Some(outdated) = outdated.filter(|outdated| outdated.key.0 != key.0) {
            std::mem::forget(outdated);
        }
        Some(threads)
    }
}
