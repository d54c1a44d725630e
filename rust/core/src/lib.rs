//! Exact, order-free gradient norms and clipping.
//!
//! The way of the data: descriptors -> [`plan`] -> [`cpu`] sums -> [`exact`] limbs -> [`finish`] -> scale.
//! This crate knows neither Python nor CUDA. Every sum is held in integer limbs, so that its value, and the total norm
//! rounded from it, do not depend on how the work was split.

pub mod chunk;
pub mod cpu;
pub mod descriptor;
pub mod dtype;
pub mod exact;
pub mod finish;
pub mod lattice;
pub mod layout;
pub mod logical;
pub mod norm;
pub mod overlap;
pub mod plan;
pub mod plan_error;
pub mod route;
pub mod slice;
