//! PyTorch's notation: one placement per axis of the user's mesh, applied left to right.
//!
//! The only file that knows `StridedShard`. Its split factor is the product of the *local* digits
//! that an axis finds to its left when it is applied: blocks, and axes that come later in the mesh.
//!
//! ```text
//! mesh (dp=2, tp=4)
//! [Shard(0), Replicate]             <->  [dp, _]
//! [Shard(0), Shard(0)]              <->  [dp.tp, _]
//! [StridedShard(0, 4), Shard(0)]    <->  [tp.dp, _]
//! [Replicate, StridedShard(0, 2)]   <->  [x2.tp, _]
//! [Replicate, Partial(sum)]         <->  [_, _] sum(tp)
//! ```
//!
//! PyTorch also labels axes of size 1, which cut nothing. Stored layouts leave them out; a parameter whose layout has
//! some carries its labelled layout beside the stored one (`label` of a parameter in a plan):
//!
//! ```text
//! mesh (dp=1, tp=2)
//! [StridedShard(0, 2), Shard(0)]    <->  [tp.dp, _], stored as [tp, _]
//! ```
//!
//! The digits say what FSDP really holds: tp cuts first, then dp cuts each piece. Where sizes are
//! uneven, PyTorch evaluates the label `[StridedShard(0, 4), Shard(0)]` to something else than what
//! its own FSDP put there; we go by what is held.

use std::fmt;

use smallvec::SmallVec;

use super::PlacementError;
use super::layout::{Digit, DimLayout};
use super::mesh::{Axis, AxisSet, Mesh};
use super::sharding::{ReduceOp, Sharding};

/// What PyTorch's `DTensor` says of one mesh axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Placement {
    /// Every coordinate holds the same.
    Replicate,
    /// The axis cuts `dim`, inside what axes to its left cut.
    Shard {
        /// The dimension.
        dim: u8,
    },
    /// The axis cuts each of `split` pieces of `dim`.
    StridedShard {
        /// The dimension.
        dim: u8,
        /// How many pieces there are.
        split: u32,
    },
    /// What is held must be reduced over the axis.
    Partial(ReduceOp),
}

/// `{}` is PyTorch's spelling, `{:#}` the short form of its dumps: `R`, `S(0)`, `SS(0, 4)`, `P(sum)`.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Replicate if f.alternate() => f.write_str("R"),
            Placement::Shard { dim } if f.alternate() => write!(f, "S({dim})"),
            Placement::StridedShard { dim, split } if f.alternate() => {
                write!(f, "SS({dim}, {split})")
            }
            Placement::Partial(op) if f.alternate() => write!(f, "P({op})"),
            Placement::Replicate => f.write_str("Replicate"),
            Placement::Shard { dim } => write!(f, "Shard({dim})"),
            Placement::StridedShard { dim, split } => write!(f, "StridedShard({dim}, {split})"),
            Placement::Partial(op) => write!(f, "Partial({op})"),
        }
    }
}

impl Sharding {
    /// Reads PyTorch placements, one per axis of the user's mesh.
    pub fn from_torch(
        placements: &[Placement],
        ndim: usize,
        mesh: &Mesh,
    ) -> Result<Sharding, PlacementError> {
        let user_axes = mesh.user_axes();
        if placements.len() != user_axes.len() {
            let names: Vec<&str> = user_axes.iter().map(|it| it.0).collect();
            return Err(PlacementError::PlacementCount {
                expected: user_axes.len(),
                found: placements.len(),
                axes: names.join(", "),
            });
        }
        let mut res = Sharding::replicated(ndim);
        for ((axes, (name, size)), placement) in mesh.user_groups().zip(user_axes).zip(placements) {
            let (dim, split) = match *placement {
                Placement::Replicate => continue,
                Placement::Partial(op) => {
                    let (first, set) = res.partial.unwrap_or((op, AxisSet::EMPTY));
                    if first != op {
                        return Err(PlacementError::MixedPartial { first, second: op });
                    }
                    res.partial = Some((op, axes.into_iter().fold(set, AxisSet::with)));
                    continue;
                }
                Placement::Shard { dim } => (dim as usize, 1),
                Placement::StridedShard { dim, split } => (dim as usize, split),
            };
            if split == 0 {
                return Err(PlacementError::ZeroBlocks { dim });
            }
            let Some(layout) = res.dims.get_mut(dim) else {
                let axis = name.to_string();
                return Err(PlacementError::DimOutOfRange { axis, dim, ndim });
            };
            *layout = Insert { dim, name, axes: &axes, size, split }.into(layout)?;
        }
        Ok(res)
    }

    /// Writes PyTorch placements, one per axis of the user's mesh.
    ///
    /// The parts of a refined axis must be used together: next to each other and in order, all
    /// partial, or not at all. Otherwise PyTorch has no word for the layout.
    pub fn to_torch(&self, mesh: &Mesh) -> Result<Vec<Placement>, PlacementError> {
        let mut res = Vec::with_capacity(mesh.axes.len());
        for axes in mesh.user_groups() {
            res.push(self.placement_of(&axes, mesh)?);
        }
        Ok(res)
    }

    fn placement_of(&self, axes: &[Axis], mesh: &Mesh) -> Result<Placement, PlacementError> {
        let part_of_axis = |dim, part: Axis| PlacementError::PartOfAxis {
            dim,
            part: mesh.name(part).to_string(),
            axis: mesh.axes[part.0 as usize].user_name().to_string(),
        };
        let set: AxisSet = axes.iter().copied().collect();
        if let Some((op, partial)) = self.partial
            && let Some(part) = partial.intersect(set).iter().next()
        {
            return match set.is_subset(partial) {
                true => Ok(Placement::Partial(op)),
                false => Err(part_of_axis(self.ndim(), part)),
            };
        }
        for (dim, layout) in self.dims.iter().enumerate() {
            let digits = layout.digits();
            if layout.granule() != 1 {
                let granule = layout.granule();
                return Err(PlacementError::Rounded { dim, granule });
            }
            let is_part = |it: &Digit| matches!(it, Digit::Axis(axis) if set.contains(*axis));
            let Some(at) = digits.iter().position(is_part) else { continue };
            let together = digits[at..].iter().take(axes.len()).copied();
            if !together.eq(axes.iter().map(|&it| Digit::Axis(it))) {
                let part = layout.axes().find(|&it| set.contains(it)).unwrap_or(axes[0]);
                return Err(part_of_axis(dim, part));
            }
            let is_local = |it: &&Digit| !matches!(it, Digit::Axis(major) if *major < axes[0]);
            let width = |it: &Digit| match *it {
                Digit::Axis(axis) => mesh.size(axis),
                Digit::Block(n) => n,
            };
            let split =
                digits[..at].iter().filter(is_local).map(width).fold(1, u32::saturating_mul);
            let dim = dim as u8;
            return Ok(match split {
                1 => Placement::Shard { dim },
                _ => Placement::StridedShard { dim, split },
            });
        }
        Ok(Placement::Replicate)
    }
}

/// An axis of the user's mesh, about to cut a dimension below its first `split` local pieces.
struct Insert<'a> {
    dim: usize,
    name: &'a str,
    axes: &'a [Axis],
    size: u32,
    split: u32,
}

impl Insert<'_> {
    fn into(self, layout: &DimLayout) -> Result<DimLayout, PlacementError> {
        let mut major = self.split;
        let mut res: SmallVec<[Digit; 8]> = SmallVec::new();
        let mut tail: SmallVec<[Digit; 8]> = layout.digits().iter().rev().copied().collect();
        // Take digits until `split` local pieces lie to the left, cutting a block in two if needed.
        while major > 1 {
            match tail.pop() {
                None => {
                    res.push(Digit::Block(major));
                    major = 1;
                }
                Some(Digit::Block(n)) if n.is_multiple_of(major) => {
                    res.push(Digit::Block(major));
                    tail.push(Digit::Block(n / major));
                    major = 1;
                }
                Some(Digit::Block(n)) if major.is_multiple_of(n) => {
                    res.push(Digit::Block(n));
                    major /= n;
                }
                Some(Digit::Block(n)) => return Err(self.misaligned(n)),
                Some(digit) => res.push(digit),
            }
        }
        // The next local digit is the one that the axis shares out; axes before it are fixed.
        while let Some(&digit) = tail.last()
            && matches!(digit, Digit::Axis(_) | Digit::Block(1))
        {
            res.push(digit);
            tail.pop();
        }
        res.extend(self.axes.iter().map(|&it| Digit::Axis(it)));
        if let Some(Digit::Block(n)) = tail.last_mut() {
            if !n.is_multiple_of(self.size) {
                return Err(self.indivisible(*n));
            }
            *n /= self.size;
        }
        res.extend(tail.into_iter().rev());
        Ok(DimLayout::new(res))
    }

    fn misaligned(&self, block: u32) -> PlacementError {
        let (dim, axis, split) = (self.dim, self.name.to_string(), self.split);
        PlacementError::Misaligned { dim, axis, split, block }
    }

    fn indivisible(&self, block: u32) -> PlacementError {
        let (dim, axis, size) = (self.dim, self.name.to_string(), self.size);
        let at_least = u64::from(self.split) * u64::from(block);
        PlacementError::Indivisible { dim, axis, size, block, at_least }
    }
}
