//! Placement: which coordinate of the mesh holds which elements of a tensor.
//!
//! A dimension is read as a mixed-radix number, digits major to minor. A [`Digit::Axis`] is fixed
//! by the mesh coordinate, a [`Digit::Block`] is kept whole, and what is left over is an implicit
//! minor-most local digit. Everything else follows from the order of the digits:
//!
//! ```text
//! mesh (dp=2, tp=4)
//! [dp, _]         rows over dp, columns whole
//! [dp.tp, _]      rows over dp, each piece over tp
//! [tp.dp, _]      rows over tp, each piece over dp: FSDP of a tensor-parallel weight
//! [x2.tp, _]      two halves, each over tp: a fused gate and up projection
//! [_, _] sum(tp)  whole everywhere; the value is the sum over tp of what is held
//! ```
//!
//! **Uneven sizes.** Each digit of width `w` cuts the range that is left, of length `n`, into
//! pieces of `ceil(n / w)`; the last ones are shorter or empty. Pieces nest, so gathering the minor
//! digit gives back exactly the piece that it cut:
//!
//! ```text
//! 7 rows as [tp.dp] on (dp=2, tp=4), in rank order -> 0 | 2 | 4 | 6 | 1 | 3 | 5 | none
//! 5 rows as [x2.tp] on (tp=2)                      -> 0 1 3 | 2 4
//! 5 rows as [tp] on (tp=4)                         -> 0 1 | 2 3 | 4 | none
//! ```
//!
//! What a coordinate holds of a dimension is stored compactly, in ascending global order. A buffer
//! has the largest local shape over all coordinates ([`Sharding::local_shape`]), so the valid part
//! is a prefix of the buffer in every dimension, and what follows it is zero.
//!
//! Nothing here knows about programs: this module depends on no other in the crate.

mod exec;
mod layout;
mod mesh;
mod reshard;
mod sharding;
mod torch;

pub use exec::{CopyRun, CopyRuns, apply_step, apply_steps, copy_runs, for_each_copy};
pub use layout::{Digit, DimLayout, Run, Runs};
pub use mesh::{Axis, AxisSet, Coord, Mesh, MeshAxis};
pub use reshard::{
    CommCost, Step, StepKind, classify, reshard, reshard_cost, step_bytes, step_cost,
};
pub use sharding::{Chunk, LocalBox, ReduceOp, Sharding, axes_alike, fsdp};
pub use torch::Placement;

/// Why a mesh, a layout or a move between layouts is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// A name that is no axis of the mesh.
    #[error("the mesh has no axis `{name}`; its axes are {known}")]
    UnknownAxis {
        /// The name as written.
        name: String,
        /// The axes that exist, as `dp, tp`.
        known: String,
    },
    /// A mesh that no coordinate can be made of.
    #[error("mesh axis `{axis}` of size {size}: {why}")]
    BadMesh {
        /// The axis at fault.
        axis: String,
        /// Its size.
        size: u32,
        /// What is wrong, and what would fix it.
        why: &'static str,
    },
    /// An axis cannot be refined into two of these sizes.
    #[error(
        "axis `{axis}` of size {size} cannot be refined into {major} times a whole number; \
         use a size that {major} divides"
    )]
    Refine {
        /// The axis to split.
        axis: String,
        /// Its size.
        size: u32,
        /// The size asked for its major part.
        major: u32,
    },
    /// The layout has another number of dimensions than the tensor.
    #[error(
        "the layout has {found} dimensions and the tensor has {expected}; write one entry per dimension"
    )]
    Ndim {
        /// Dimensions of the tensor.
        expected: usize,
        /// Dimensions of the layout.
        found: usize,
    },
    /// A placement names a dimension that the tensor does not have.
    #[error("axis `{axis}` shards dim {dim}, but the tensor has {ndim} dimensions, counted from 0")]
    DimOutOfRange {
        /// The axis whose placement it is.
        axis: String,
        /// The dimension named.
        dim: usize,
        /// Dimensions of the tensor.
        ndim: usize,
    },
    /// Not one placement per axis of the user's mesh.
    #[error("{found} placements for a mesh of {expected} axes ({axes}); write one per axis")]
    PlacementCount {
        /// Axes of the user's mesh.
        expected: usize,
        /// Placements given.
        found: usize,
        /// The axes, as `dp, tp`.
        axes: String,
    },
    /// One axis cuts a tensor twice.
    #[error(
        "axis `{axis}` is used in dim {first} and again in dim {second}; an axis can cut a tensor once"
    )]
    AxisReused {
        /// The axis.
        axis: String,
        /// Where it is used first.
        first: usize,
        /// Where it is used again.
        second: usize,
    },
    /// An axis both shards the tensor and is still to be reduced over.
    #[error(
        "axis `{axis}` shards dim {dim} and is also partial; reduce over it before sharding over it"
    )]
    PartialAndSharded {
        /// The axis.
        axis: String,
        /// The dimension it shards.
        dim: usize,
    },
    /// An axis index beyond the mesh.
    #[error(
        "the layout uses axis number {axis}, but the mesh has {axes} axes; it was made for another mesh"
    )]
    AxisOutOfRange {
        /// Index of the axis.
        axis: u8,
        /// Axes of the mesh.
        axes: usize,
    },
    /// A block digit of zero blocks.
    #[error("dim {dim} is cut into 0 blocks; use at least 1")]
    ZeroBlocks {
        /// The dimension.
        dim: usize,
    },
    /// Pieces that are to be multiples of a number that does not divide the dimension.
    #[error(
        "dim {dim} of {size} is cut in multiples of {granule}, which does not divide it; use a \
         granule that does"
    )]
    Granule {
        /// The dimension.
        dim: usize,
        /// What its pieces are to be multiples of.
        granule: u32,
        /// Its size.
        size: u64,
    },
    /// The layout cuts in multiples of a number, which PyTorch has no word for.
    #[error(
        "dim {dim} is cut in multiples of {granule}, and PyTorch has no placement for that; its \
         boxes are in the checkpoint's metadata all the same"
    )]
    Rounded {
        /// The dimension.
        dim: usize,
        /// What its pieces are multiples of.
        granule: u32,
    },
    /// A reduction over no axis.
    #[error("`{op}` over no axis; leave it out or name an axis")]
    EmptyPartial {
        /// The reduction.
        op: ReduceOp,
    },
    /// One tensor waits for two different reductions.
    #[error("partial values of two kinds, {first} and {second}; reduce one of them first")]
    MixedPartial {
        /// The reduction found first.
        first: ReduceOp,
        /// The other one.
        second: ReduceOp,
    },
    /// The split factor falls inside a block.
    #[error(
        "dim {dim}: the split of {split} for axis `{axis}` cuts into {block} blocks that are already \
         there, so a gather could not put the pieces back; use a split that divides {block} or that \
         {block} divides"
    )]
    Misaligned {
        /// The dimension.
        dim: usize,
        /// The axis being placed.
        axis: String,
        /// Its split factor.
        split: u32,
        /// The blocks in its way.
        block: u32,
    },
    /// The axis would have to cut across blocks that are there already.
    #[error(
        "dim {dim}: axis `{axis}` of size {size} does not divide the {block} blocks that it has to \
         share out, so a gather could not put the pieces back; give the axis that makes the blocks a split \
         that {size} divides, or `{axis}` one of at least {at_least}"
    )]
    Indivisible {
        /// The dimension.
        dim: usize,
        /// The axis being placed.
        axis: String,
        /// Its size.
        size: u32,
        /// The blocks it finds.
        block: u32,
        /// The split that would put it to the right of those blocks.
        at_least: u64,
    },
    /// The layout uses a part of an axis of the user's mesh, which PyTorch has no word for.
    #[error(
        "dim {dim}: `{part}` is only a part of mesh axis `{axis}`; PyTorch can write it only together \
         with, and next to, the other parts"
    )]
    PartOfAxis {
        /// The dimension, or the number of dimensions where the axis is partial.
        dim: usize,
        /// The sub-axis found.
        part: String,
        /// The user's axis.
        axis: String,
    },
    /// Text that is not a sharding.
    #[error("`{text}` is not a sharding: {why}; write it as `[dp.tp, _]` or `[_, _] sum(tp)`")]
    Parse {
        /// The text as written.
        text: String,
        /// What is wrong with it.
        why: String,
    },
}
