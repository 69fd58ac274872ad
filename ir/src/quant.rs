//! Low-precision formats, scales and recipes.

pub mod block_gemm;
pub mod blocks;
pub mod delayed;
pub mod format;
pub mod layout;
pub mod mx;
pub mod nvfp4;
pub mod recipe;
pub mod scale;

pub use delayed::{AmaxAlgo, Delayed};
pub use format::Format;
pub use recipe::{
    Custom, DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Fp8Format, GemmRole,
    MXFP8BlockScaling, NVFP4BlockScaling, QuantSpec, Recipe, RecipeError, Role, Scaling,
};
pub use scale::ScaleRule;
