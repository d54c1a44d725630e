//! Where the objects of a plan were when they were last read, to ask for these lines of memory before they are read
//! again: after a training step no cache holds them, and each costs several misses in a row.
//!
//! An address that holds for nothing any more costs nothing either: memory is asked for, never read.

use std::sync::atomic::{AtomicUsize, Ordering};

/// How many places ahead of the reader memory is asked for.
pub const AHEAD: usize = 6;

/// Bytes of a line of memory.
const LINE: usize = 64;

/// Lines to ask for, from the one before the known word on: a parameter leads to its gradient from its first ones, a
/// gradient is read whole.
const LINES: [usize; 2] = [2, 4];

/// One tensor: its Python object and a word inside of torch's own object behind it.
#[derive(Default)]
struct Trace {
    object: AtomicUsize,
    inside: AtomicUsize,
}

/// For each planned tensor, traces of its parameter and of itself.
pub struct Traces(Vec<[Trace; 2]>);

/// Whose trace.
#[derive(Clone, Copy)]
pub enum Whose {
    Parameter,
    Gradient,
}

impl Traces {
    /// No traces yet, for `count` tensors.
    pub fn new(count: usize) -> Self {
        Traces((0..count).map(|_| Default::default()).collect())
    }

    /// Asks for what the tensor at a place and its parameter lay in.
    pub fn ask_for(&self, place: usize) {
        for (trace, lines) in self.0.get(place).into_iter().flatten().zip(LINES) {
            ask_for(trace.object.load(Ordering::Relaxed));
            let inside = trace.inside.load(Ordering::Relaxed);
            for line in 0..lines {
                ask_for(inside.wrapping_add(line * LINE).wrapping_sub(LINE));
            }
        }
    }

    /// Whether the trace at a place is that of an object.
    pub fn knows(&self, place: usize, whose: Whose, object: usize) -> bool {
        self.0[place][whose as usize].object.load(Ordering::Relaxed) == object
    }

    /// Notes the trace at a place: the object's address, and one inside of what torch keeps behind it.
    pub fn note(&self, place: usize, whose: Whose, object: usize, inside: usize) {
        let trace = &self.0[place][whose as usize];
        trace.object.store(object, Ordering::Relaxed);
        trace.inside.store(inside, Ordering::Relaxed);
    }
}

#[cfg(target_arch = "x86_64")]
fn ask_for(address: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a hint, which never faults, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address as *const i8) };
}

#[cfg(not(target_arch = "x86_64"))]
fn ask_for(_address: usize) {}
