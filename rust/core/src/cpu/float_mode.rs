//! The floating-point mode of a thread.
//!
//! `torch.set_flush_denormal(True)` makes its thread, and threads started from it, read and write subnormals as zero.
//! An exact sum needs them, so the engine works in IEEE's default mode and puts the caller's back.

use std::arch::asm;
use std::hint::black_box;

/// Runs `work` on `input` in the default mode.
///
/// Arithmetic on values that are in registers is not ordered by a change of mode: the boxes tie it to its place.
pub fn in_standard_mode<I, O>(input: I, work: impl FnOnce(I) -> O) -> O {
    let _mode = StandardMode::enter();
    black_box(work(black_box(input)))
}

/// Enters the default mode on this thread; what it was, for [`restore`].
pub fn enter() -> u64 {
    let previous = read();
    if previous != STANDARD {
        write(STANDARD);
    }
    previous
}

/// Puts a mode back that [`enter`] gave on this thread.
pub fn restore(previous: u64) {
    if previous != STANDARD {
        write(previous);
    }
}

/// The default mode, until dropped; for work on memory.
pub struct StandardMode {
    previous: u64,
}

#[cfg(target_arch = "x86_64")]
const STANDARD: u64 = 0x1F80; // all exceptions masked, to nearest, no flushing

#[cfg(target_arch = "aarch64")]
const STANDARD: u64 = 0;

impl StandardMode {
    /// Enters the default mode on this thread.
    #[inline]
    pub fn enter() -> Self {
        let previous = read();
        if previous != STANDARD {
            write(STANDARD);
        }
        StandardMode { previous }
    }
}

impl Drop for StandardMode {
    #[inline]
    fn drop(&mut self) {
        if self.previous != STANDARD {
            write(self.previous);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn read() -> u64 {
    let mut control: u32 = 0;
    // SAFETY: stores the 4 bytes of MXCSR into a local of that size.
    unsafe { asm!("stmxcsr [{}]", in(reg) &mut control, options(nostack, preserves_flags)) };
    // The sticky exception flags in the low six bits are no part of the mode.
    u64::from(control & !0x3F)
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn write(control: u64) {
    let control = control as u32 & 0xFFC0;
    // SAFETY: loads MXCSR from a local; only bits that every processor defines are set.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &control, options(nostack, preserves_flags)) };
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn read() -> u64 {
    let control: u64;
    // SAFETY: reads a control register that every thread may read.
    unsafe { asm!("mrs {}, fpcr", out(reg) control, options(nomem, nostack, preserves_flags)) };
    control
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn write(control: u64) {
    // SAFETY: bits that a processor does not define are ignored.
    unsafe { asm!("msr fpcr, {}", in(reg) control, options(nomem, nostack, preserves_flags)) };
}
