//! `Float8BlockScaling`: an f32 scale for each 1x128 of an input or gradient and each 128x128 of a weight.
//!
//! No amax crosses a rank: a block is never split. GEMMs scale the sums of every 128 products, and add them
//! up in f32.

use super::{Fp8Format, QuantSpec, RecipeDef, RecipeError, Role, Scaling, require};

recipe! {
    /// See the [module docs](self).
    pub struct Float8BlockScaling {
        /// Scales are not rounded down to a power of two; false.
        pub use_f32_scales: bool = false,
        /// Formats of the codes; `E4M3`.
        pub fp8_format: Fp8Format = Fp8Format::E4M3,
        /// Dimensions of an input's blocks: 1 (1x128) or 2 (128x128); 1.
        pub x_block_scaling_dim: u8 = 1,
        /// Those of a weight's; 2. At most one of the three is 2: no GEMM takes two operands with such blocks.
        pub w_block_scaling_dim: u8 = 2,
        /// Those of a gradient's; 1.
        pub grad_block_scaling_dim: u8 = 1,
    }
}

impl RecipeDef for Float8BlockScaling {
    fn spec(&self, role: Role) -> Option<QuantSpec> {
        let dims = match role {
            Role::Input => self.x_block_scaling_dim,
            Role::Weight => self.w_block_scaling_dim,
            Role::Grad => self.grad_block_scaling_dim,
        };
        let rows = if dims == 2 { 128 } else { 1 };
        let scaling = Scaling::Block { rows, columns: 128, pow2: !self.use_f32_scales };
        Some(QuantSpec { format: self.fp8_format.of(role), scaling })
    }

    fn check(&self) -> Result<(), RecipeError> {
        let mut square: Option<&str> = None;
        let dims = [
            ("x_block_scaling_dim", self.x_block_scaling_dim),
            ("w_block_scaling_dim", self.w_block_scaling_dim),
            ("grad_block_scaling_dim", self.grad_block_scaling_dim),
        ];
        for (field, dims) in dims {
            require((1..=2).contains(&dims), field, dims, "1 or 2")?;
            if dims == 2 {
                if let Some(first) = square {
                    let expected = format!("1 where {first} is 2: a GEMM takes one such operand");
                    return require(false, field, dims, &expected);
                }
                square = Some(field);
            }
        }
        Ok(())
    }
}
