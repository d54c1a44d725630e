//! The exact sum: integer limbs, and the roundings that turn it into a norm.

mod double_double;
mod limbs;
mod round;
mod sums;

pub use double_double::DoubleDouble;
pub use limbs::{BASE, LIMBS, Limbs};
pub use round::{power_of_two, root, square_root, times_power_of_two, to_odd_float32, value};
pub use sums::{NO_EXTREME, SUMS_LENGTH, Sums};
