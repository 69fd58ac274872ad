//! Low-precision formats, scales and recipes, and amax groups: over which mesh axes a scale must agree.

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

use crate::placement::{AxisSet, Sharding};

/// Mesh axes over which a tensor's scale must agree: those that spread its elements, within a scope
/// (`weight_mesh` for a weight). Axes that only hold replicas are never in it.
///
/// ```text
/// weight [tp.dp, _],  scope (dp, tp)  -> (dp, tp)
/// weight [tp, _],     scope (dp, tp)  -> (tp)         dp only replicates (HSDP)
/// weight [tp.dp, _],  scope (dp)      -> (dp)         a lint: the scale varies over tp
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AmaxGroup(AxisSet);

impl AmaxGroup {
    /// The group of a tensor laid out like `sharding`.
    pub fn of(sharding: &Sharding, scope: AxisSet) -> AmaxGroup {
        AmaxGroup(sharding.sharded_axes().intersect(scope))
    }

    /// Its axes; none for a replicated tensor, whose scale needs no reduction.
    pub fn axes(self) -> AxisSet {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Mesh;

    #[track_caller]
    fn check(sharding: &str, scope: &[&str], expect: &str) {
        let mesh = Mesh::new(&[("dp_replicate", 2), ("dp", 2), ("tp", 4)]);
        let sharding = Sharding::parse(sharding, &mesh).unwrap();
        let group = AmaxGroup::of(&sharding, mesh.axis_set(scope).unwrap());
        assert_eq!(mesh.names(group.axes()), expect);
    }

    #[test]
    fn replica_axes_stay_out_of_the_group() {
        check("[tp.dp, _]", &["dp_replicate", "dp", "tp"], "dp, tp");
        check("[tp, _]", &["dp_replicate", "dp", "tp"], "tp");
        check("[tp.dp, _]", &["dp"], "dp");
        check("[_, _]", &["dp", "tp"], "");
    }
}
