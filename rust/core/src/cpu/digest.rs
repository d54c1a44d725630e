//! A digest of bits and positions, by which replicas of a tensor are compared.
//!
//! Elements are cut into words of at most 32 bits, numbered in row-major order. The digest is the sum of weight(k) times
//! word k, modulo 2^64, so parts of a tensor add up whatever their order. `python/gradclip/reference/digest.py` holds the
//! definition and what a digest notices.

use rayon::prelude::*;

use super::Threads;

const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
const MIX: u64 = 0xBF58_476D_1CE4_E5B9;

/// Words that one thread takes at a time.
const PIECE: usize = 1 << 16;

/// The weight of word `index`: odd, so that no change of one word is lost.
#[inline]
pub fn weight(index: u64) -> u64 {
    let spread = index.wrapping_add(1).wrapping_mul(STEP);
    (spread ^ (spread >> 32)).wrapping_mul(MIX) | 1
}

/// An unsigned word of at most 32 bits.
pub trait Word: Copy + Send + Sync {
    /// Its value.
    fn value(self) -> u64;
}

impl Word for u8 {
    fn value(self) -> u64 {
        self.into()
    }
}

impl Word for u16 {
    fn value(self) -> u64 {
        self.into()
    }
}

impl Word for u32 {
    fn value(self) -> u64 {
        self.into()
    }
}

/// The digest of words of which the first has number `first`.
pub fn digest<W: Word>(words: &[W], first: u64, threads: Threads) -> u64 {
    if !threads.share(words.len() as u64) {
        return of_piece(words, first);
    }
    threads.run(|| {
        let pieces = words.par_chunks(PIECE).enumerate();
        let digests = pieces.map(|(k, piece)| of_piece(piece, first.wrapping_add((k * PIECE) as u64)));
        digests.reduce(|| 0, u64::wrapping_add)
    })
}

fn of_piece<W: Word>(words: &[W], first: u64) -> u64 {
    let weighted = words.iter().enumerate().map(|(k, word)| {
        let index = first.wrapping_add(k as u64);
        weight(index).wrapping_mul(word.value())
    });
    weighted.fold(0, u64::wrapping_add)
}
