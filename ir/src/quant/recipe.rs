//! Recipes: which operands of a GEMM are quantized, to which format, and how their scales are made.
//!
//! ```text
//! fprop  y  = x W^T    Input, Weight
//! dgrad  dx = dy W     Grad,  Weight
//! wgrad  dW = dy^T x   Grad,  Input
//! ```
//!
//! A recipe is data: what is done with it is a pass's business. Recipes, fields and defaults have the names
//! that they have in TransformerEngine 2.20 (`transformer_engine/common/recipe/__init__.py`), but for what
//! it takes from the environment. To add one: write its file and add it to `define_recipes!`.

use serde::{Deserialize, Serialize};

use super::{AmaxAlgo, Format};
use crate::ops::{Number, is_default};

/// Defines the struct of a recipe: fields with their defaults, which need not be given and are not printed.
macro_rules! recipe {
    ($(#[$meta:meta])* pub struct $ty:ident { $($(#[$field_meta:meta])* pub $field:ident: $field_ty:ty = $default:expr,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $ty {
            $($(#[$field_meta])* pub $field: $field_ty,)*
        }

        impl Default for $ty {
            fn default() -> $ty {
                $ty { $($field: $default,)* }
            }
        }

        impl serde::Serialize for $ty {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                use serde::ser::SerializeStruct;
                let default = $ty::default();
                let n = [$(self.$field != default.$field,)*].into_iter().filter(|it| *it).count();
                let mut res = to.serialize_struct(stringify!($ty), n)?;
                $(if self.$field != default.$field {
                    res.serialize_field(stringify!($field), &self.$field)?;
                })*
                res.end()
            }
        }
    };
}

macro_rules! define_recipes {
    ($($file:ident :: $ty:ident,)*) => {
        $(pub mod $file; pub use $file::$ty;)*

        /// How the GEMMs of a module are quantized.
        #[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[allow(missing_docs)]
        pub enum Recipe {
            /// Nothing is quantized, whatever the compute type is.
            #[default]
            Bf16,
            $($ty($ty),)*
        }

        impl Recipe {
            /// The name in `model.ron`.
            pub fn name(&self) -> &'static str {
                match self {
                    Recipe::Bf16 => "Bf16",
                    $(Recipe::$ty(_) => stringify!($ty),)*
                }
            }

            fn def(&self) -> Option<&dyn RecipeDef> {
                match self {
                    Recipe::Bf16 => None,
                    $(Recipe::$ty(it) => Some(it),)*
                }
            }
        }
    };
}

define_recipes! {
    delayed::DelayedScaling,
    current::Float8CurrentScaling,
    block::Float8BlockScaling,
    mx::MXFP8BlockScaling,
    nvfp4::NVFP4BlockScaling,
    custom::Custom,
}

/// What it means to be a recipe.
trait RecipeDef {
    /// How an operand is quantized; `None` keeps it in the compute type.
    fn spec(&self, role: Role) -> Option<QuantSpec>;

    /// Checks the ranges of the recipe's own fields.
    fn check(&self) -> Result<(), RecipeError> {
        Ok(())
    }
}

impl Recipe {
    /// How an operand is quantized; `None` keeps it in the compute type. A GEMM with an operand that is not
    /// quantized is none of the recipe's.
    pub fn spec(&self, role: Role) -> Option<QuantSpec> {
        self.def()?.spec(role)
    }

    /// Whether a GEMM may add its products up in the tensor core's own precision: fprop of operands with one
    /// scale each, as in TransformerEngine (`use_split_accumulator` is off there).
    pub fn fast_accumulation(&self, gemm: GemmRole) -> bool {
        let is_fast = |it| self.spec(it).is_some_and(|it| it.scaling.is_per_tensor());
        gemm == GemmRole::Fprop && gemm.operands().into_iter().all(is_fast)
    }

    /// Checks the ranges of all fields.
    pub fn check(&self) -> Result<(), RecipeError> {
        self.def().map_or(Ok(()), RecipeDef::check)
    }
}

/// What a tensor is to a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// `x`, what a module reads.
    Input,
    /// `W`.
    Weight,
    /// `dy`, the gradient of what a module makes.
    Grad,
}

impl Role {
    /// Every role.
    pub const ALL: [Role; 3] = [Role::Input, Role::Weight, Role::Grad];
}

/// One of the three GEMMs of a projection; see the [module docs](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GemmRole {
    /// `y = x W^T`.
    Fprop,
    /// `dx = dy W`.
    Dgrad,
    /// `dW = dy^T x`.
    Wgrad,
}

impl GemmRole {
    /// Every GEMM.
    pub const ALL: [GemmRole; 3] = [GemmRole::Fprop, GemmRole::Dgrad, GemmRole::Wgrad];

    /// What it multiplies.
    pub fn operands(self) -> [Role; 2] {
        match self {
            GemmRole::Fprop => [Role::Input, Role::Weight],
            GemmRole::Dgrad => [Role::Grad, Role::Weight],
            GemmRole::Wgrad => [Role::Grad, Role::Input],
        }
    }
}

/// How one operand is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuantSpec {
    /// Of its codes.
    pub format: Format,
    /// How its scales are made.
    pub scaling: Scaling,
}

/// How the scales of a tensor are made. Blocks are along the dimension that a GEMM contracts, so that the row
/// and column copies of a tensor differ unless its blocks are squares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Scaling {
    /// One f32 scale, from the amax of the tensor itself.
    Current {
        /// Scales are rounded down to a power of two.
        #[serde(default, skip_serializing_if = "is_default")]
        pow2: bool,
        /// An amax below this counts as this.
        #[serde(default, skip_serializing_if = "is_default")]
        epsilon: Number,
    },
    /// One f32 scale, from the amaxes of earlier micro-batches.
    Delayed {
        /// Scales are 2^margin below what the amax asks for.
        #[serde(default, skip_serializing_if = "is_default")]
        margin: i32,
        /// Amaxes that are kept.
        #[serde(default = "delayed::history", skip_serializing_if = "delayed::is_history")]
        history: u32,
        /// Which of them makes the scale.
        #[serde(default, skip_serializing_if = "is_default")]
        algo: AmaxAlgo,
    },
    /// An f32 scale for each block.
    Block {
        /// Rows of a block: 1 or 128.
        rows: u32,
        /// Columns of a block: 128.
        columns: u32,
        /// Scales are rounded down to a power of two.
        #[serde(default = "yes", skip_serializing_if = "is_yes")]
        pow2: bool,
    },
    /// An E8M0 scale for each block of 1x32.
    Mx {
        /// Blocks are 32x32.
        #[serde(default, skip_serializing_if = "is_default")]
        two_dimensional: bool,
    },
    /// An E4M3 scale for each block of 1x16, below one f32 scale from the amax of the tensor.
    NvFp4 {
        /// Blocks are 16x16.
        #[serde(default, skip_serializing_if = "is_default")]
        two_dimensional: bool,
        /// The copy that wgrad reads is the random Hadamard transform of the tensor.
        #[serde(default, skip_serializing_if = "is_default")]
        hadamard: bool,
        /// Codes are rounded stochastically.
        #[serde(default, skip_serializing_if = "is_default")]
        stochastic: bool,
    },
}

impl Scaling {
    /// Whether the tensor has one scale and no others.
    pub fn is_per_tensor(self) -> bool {
        match self {
            Scaling::Current { .. } | Scaling::Delayed { .. } => true,
            Scaling::Block { .. } | Scaling::Mx { .. } | Scaling::NvFp4 { .. } => false,
        }
    }
}

fn yes() -> bool {
    true
}

fn is_yes(it: &bool) -> bool {
    *it
}

/// The format of FP8 codes by direction. TransformerEngine has no recipe that is E5M2 throughout either.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Fp8Format {
    /// E4M3 in the forward pass, E5M2 for gradients.
    Hybrid,
    /// E4M3 throughout.
    E4M3,
}

impl Fp8Format {
    /// The format of an operand.
    pub fn of(self, role: Role) -> Format {
        match (self, role) {
            (Fp8Format::Hybrid, Role::Grad) => Format::E5M2,
            (Fp8Format::Hybrid, Role::Input | Role::Weight) | (Fp8Format::E4M3, _) => Format::E4M3,
        }
    }
}

/// A field of a recipe that is out of its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {found}, and must be {expected}")]
pub struct RecipeError {
    /// The field, from the recipe on: `weight.scaling.history`.
    pub field: String,
    /// Its value.
    pub found: String,
    /// What it must be.
    pub expected: String,
}

fn require(ok: bool, field: &str, found: impl ToString, expected: &str) -> Result<(), RecipeError> {
    match ok {
        true => Ok(()),
        false => {
            let (field, found) = (field.to_string(), found.to_string());
            Err(RecipeError { field, found, expected: expected.to_string() })
        }
    }
}

#[cfg(test)]
mod tests;
