//! The threads of the engine.

use std::num::NonZero;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::{process, ptr, thread};

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::simd::detect;

/// Elements from which work is spread over threads: with fewer, waking others takes longer.
const WORTH_A_THREAD: u64 = 64 * 1024;

/// Threads that may be started whatever the number of cores.
const ALWAYS_ALLOWED: usize = 8;

/// How many threads may work on one call; 1 stays on the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads(usize);

impl Threads {
    /// At most `count` threads, and no more than there are cores to run them (or 8); 0 counts as 1.
    pub fn new(count: usize) -> Self {
        Threads(count.clamp(1, cores().max(ALWAYS_ALLOWED)))
    }

    /// Runs `parallel` inside a pool of this many threads; `alone`, which must do the same, on the caller's thread for
    /// work on few elements, with one thread, or where no thread can be started.
    pub fn spread<R: Send>(self, elements: u64, parallel: impl FnOnce() -> R + Send, alone: impl FnOnce() -> R) -> R {
        let worth = self.0 > 1 && elements >= WORTH_A_THREAD;
        match if worth { Pools::of_this_process().sized(self.0) } else { None } {
            Some(pool) => pool.install(parallel),
            None => alone(),
        }
    }
}

fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, NonZero::get))
}

/// Sets up what is set up once in a process. A fork in the middle of that, on another thread, would leave the child
/// waiting for its end: so it is done before there are threads.
pub fn prepare() {
    cores();
    detect();
    crossbeam_epoch::default_collector(); // of the queues in a pool
}

/// The pool of one process, of the size asked for last: one of another size ends when its work is done.
///
/// Threads do not survive a fork, and a lock that another thread held stays locked in the child. So a child makes pools
/// of its own, and leaves its parent's alone: nothing would answer their end.
struct Pools {
    process: u32,
    last: Mutex<Option<(usize, Arc<ThreadPool>)>>,
}

impl Pools {
    fn of_this_process() -> &'static Self {
        static CURRENT: AtomicPtr<Pools> = AtomicPtr::new(ptr::null_mut());
        let process = process::id();
        let mut current = CURRENT.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or from `Box::leak` below and never freed.
            if let Some(pools) = unsafe { current.as_ref() }.filter(|pools| pools.process == process) {
                return pools;
            }
            let made: *mut Pools = Box::leak(Box::new(Pools { process, last: Mutex::default() }));
            match CURRENT.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => current = made,
                Err(other) => current = other,
            }
        }
    }

    /// The pool of so many threads; `None` where they cannot be started.
    fn sized(&self, count: usize) -> Option<Arc<ThreadPool>> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pool)) = last.as_ref().filter(|(size, _)| *size == count) {
            return Some(pool.clone());
        }
        let builder = ThreadPoolBuilder::new().num_threads(count).thread_name(|i| format!("gradclip-{i}"));
        let pool = Arc::new(builder.build().ok()?);
        *last = Some((count, pool.clone()));
        Some(pool)
    }
}
