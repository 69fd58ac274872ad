//! From one sharding to another: the cheapest sequence of collectives.
//!
//! A step keeps, in every dimension, the digits in front of some point (the base) and changes those
//! behind it. Behind the base live only the axes of the step, so all that a coordinate will want is
//! already inside its group over those axes, for any sizes:
//!
//! ```text
//! [tp.dp, _]           -> [tp, _]          all-gather over dp of dim 0
//! [tp, _]              -> [tp.dp, _]       slice, local
//! [tp.dp, _]           -> [tp, dp]         all-to-all over dp
//! [dp.tp, _]           -> [tp.dp, _]       permute over dp and tp
//! [_, _] sum(dp, tp)   -> [_, _] sum(dp)   all-reduce over tp
//! [_, _] sum(dp)       -> [dp, _]          reduce-scatter over dp
//! [_, _]               -> [_, _] sum(dp)   local
//! ```
//!
//! [`classify`] is that rule, and the only definition of a step. [`reshard`] knows the everyday
//! moves by heart and searches for the others (`search`); the cost of a path is the
//! cost of the steps that are emitted. An axis that neither side uses may help: with copies over
//! dp, a large all-reduce over tp is cheaper on a slice by dp, gathered afterwards.

mod search;

use self::search::Search;
use super::PlacementError;
use super::layout::{Digit, DimLayout};
use super::mesh::{Axis, AxisSet, Mesh};
use super::sharding::{ReduceOp, Sharding};

/// What a step does. The layout after it says in which order axes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StepKind {
    /// Every coordinate gets the pieces of `dim` that its group over `axes` holds.
    AllGather {
        /// The dimension that grows.
        dim: u8,
        /// The group.
        axes: AxisSet,
    },
    /// Reduces over `axes`, and every coordinate keeps its piece of `dim`.
    ReduceScatter {
        /// The dimension that shrinks.
        dim: u8,
        /// The group.
        axes: AxisSet,
        /// The reduction.
        op: ReduceOp,
    },
    /// Reduces over `axes`; every coordinate gets the result.
    AllReduce {
        /// The group.
        axes: AxisSet,
        /// The reduction.
        op: ReduceOp,
    },
    /// `axes` stop to cut `from_dim` and cut `to_dim`.
    AllToAll {
        /// The group.
        axes: AxisSet,
        /// The dimension that grows.
        from_dim: u8,
        /// The dimension that shrinks.
        to_dim: u8,
    },
    /// `axes` change places, in one dimension or several: each coordinate sends the others in its
    /// group what they hold from now on.
    Permute {
        /// The group.
        axes: AxisSet,
    },
    /// Every coordinate keeps its piece of `dim`; nothing is sent.
    Slice {
        /// The dimension that shrinks.
        dim: u8,
        /// The axes that cut it from now on.
        axes: AxisSet,
    },
    /// Copies become parts of a reduction; nothing is sent. For a sum, the coordinate 0 over
    /// `axes` keeps the value and the others hold zero; for `avg`, `max` and `min` copies are
    /// right as they are.
    ToPartial {
        /// The axes over which there were copies.
        axes: AxisSet,
        /// The reduction.
        op: ReduceOp,
    },
}

/// A step, and the sharding after it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Step {
    /// What is done.
    pub kind: StepKind,
    /// The sharding that it leads to.
    pub to: Sharding,
}

/// What collectives cost, for choosing between them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CommCost {
    /// Seconds that any collective takes.
    pub latency: f64,
    /// Bytes per second that a rank sends and receives.
    pub bandwidth: f64,
}

impl Default for CommCost {
    /// One node of GPUs on a switch: 10 us and 200 GB/s.
    fn default() -> CommCost {
        CommCost { latency: 10e-6, bandwidth: 200e9 }
    }
}

impl StepKind {
    /// The axes of its group; for a local step, those that it gives a meaning to.
    pub fn axes(self) -> AxisSet {
        match self {
            StepKind::AllGather { axes, .. }
            | StepKind::ReduceScatter { axes, .. }
            | StepKind::AllReduce { axes, .. }
            | StepKind::AllToAll { axes, .. }
            | StepKind::Permute { axes }
            | StepKind::Slice { axes, .. }
            | StepKind::ToPartial { axes, .. } => axes,
        }
    }

    /// Whether nothing is sent.
    pub fn is_local(self) -> bool {
        matches!(self, StepKind::Slice { .. } | StepKind::ToPartial { .. })
    }
}

/// The step that leads from `from` to `to`, if one does.
pub fn classify(from: &Sharding, to: &Sharding, shape: &[u64], mesh: &Mesh) -> Option<StepKind> {
    let (was, is) = (from.partial_axes(), to.partial_axes());
    if let (Some((a, _)), Some((b, _))) = (from.partial, to.partial)
        && a != b
    {
        return None;
    }
    let (cleared, added) = (was.minus(is), is.minus(was));
    let (mut lost, mut gained) = (AxisSet::EMPTY, AxisSet::EMPTY);
    let (mut shrinks, mut grows) = (None, None);
    let mut changed = 0;
    for (dim, (a, b)) in from.dims.iter().zip(&to.dims).enumerate() {
        if a == b {
            continue;
        }
        changed += 1;
        let base = common_base(a, b, shape[dim], mesh);
        let behind = |it: &DimLayout| -> AxisSet { axes_of(&it.digits()[base..]).collect() };
        let (out, new) = (behind(a), behind(b));
        if !out.is_empty() {
            grows = Some(dim as u8);
        }
        if !new.is_empty() {
            shrinks = Some(dim as u8);
        }
        lost = lost.union(out);
        gained = gained.union(new);
    }
    if !added.is_empty() {
        let (op, _) = to.partial?;
        let copies = cleared.is_empty() && changed == 0 && {
            added.intersect(from.sharded_axes()).is_empty()
        };
        return copies.then_some(StepKind::ToPartial { axes: added, op });
    }
    if !cleared.is_empty() {
        let (op, _) = from.partial?;
        return match (changed, shrinks) {
            (0, _) => Some(StepKind::AllReduce { axes: cleared, op }),
            (1, Some(dim)) if lost.is_empty() && gained == cleared => {
                Some(StepKind::ReduceScatter { dim, axes: cleared, op })
            }
            _ => None,
        };
    }
    match (shrinks, grows) {
        (None, None) => None,
        (Some(dim), None) if changed == 1 => Some(StepKind::Slice { dim, axes: gained }),
        (None, Some(dim)) if changed == 1 => Some(StepKind::AllGather { dim, axes: lost }),
        (Some(to_dim), Some(from_dim)) if lost == gained => {
            let one_way = changed == 2 && to_dim != from_dim && {
                let base = |dim: u8| {
                    let dim = dim as usize;
                    common_base(&from.dims[dim], &to.dims[dim], shape[dim], mesh)
                };
                base(from_dim) == to.dims[from_dim as usize].digits().len()
                    && base(to_dim) == from.dims[to_dim as usize].digits().len()
            };
            Some(match one_way {
                true => StepKind::AllToAll { axes: lost, from_dim, to_dim },
                false => StepKind::Permute { axes: lost },
            })
        }
        _ => None,
    }
}

/// How many leading digits two layouts share, as ranges that both cut further; of layouts that
/// differ in their granules only, not all.
fn common_base(a: &DimLayout, b: &DimLayout, size: u64, mesh: &Mesh) -> usize {
    if a == b {
        return a.digits().len();
    }
    let same = a.digits().iter().zip(b.digits()).take_while(|(a, b)| a == b).count();
    let most = same.min(a.digits().len().max(b.digits().len()) - 1);
    let nests = |n: usize| {
        let same = || a.prefix(n, size, mesh) == b.prefix(n, size, mesh);
        a.nests_at(n, size, mesh) && b.nests_at(n, size, mesh) && same()
    };
    (0..=most).rev().find(|&n| nests(n)).unwrap_or(0)
}

fn axes_of(digits: &[Digit]) -> impl Iterator<Item = Axis> + '_ {
    digits.iter().filter_map(|it| match *it {
        Digit::Axis(axis) => Some(axis),
        Digit::Block(_) => None,
    })
}

/// How many bytes a rank sends in a step, as a ring does it: all-gather and reduce-scatter
/// `(g-1)/g` of what the group has together, all-reduce twice that, all-to-all `(g-1)/g` of what a
/// rank holds, permute all of it. Pieces that a gather or a scatter pads are no reason to choose another
/// step, so what pads them is not counted.
pub fn step_bytes(
    step: &Step,
    from: &Sharding,
    shape: &[u64],
    elem_bytes: u64,
    mesh: &Mesh,
) -> f64 {
    let bytes = |it: &Sharding| -> f64 {
        let local: u64 = it.local_shape(shape, mesh).iter().product();
        (local * elem_bytes) as f64
    };
    let group = mesh.set_size(step.kind.axes()) as f64;
    let others = (group - 1.0) / group;
    match step.kind {
        StepKind::AllGather { .. } => others * bytes(&step.to),
        StepKind::ReduceScatter { .. } => others * bytes(from),
        StepKind::AllReduce { .. } => 2.0 * others * bytes(from),
        StepKind::AllToAll { .. } => others * bytes(from),
        StepKind::Permute { .. } if same_but_for_size_one(from, &step.to, mesh) => 0.0,
        StepKind::Permute { .. } => bytes(from),
        StepKind::Slice { .. } | StepKind::ToPartial { .. } => 0.0,
    }
}

/// Seconds that a step takes. A group of one costs nothing.
pub fn step_cost(
    step: &Step,
    from: &Sharding,
    shape: &[u64],
    elem_bytes: u64,
    mesh: &Mesh,
    cost: &CommCost,
) -> f64 {
    let moves = match step.kind {
        StepKind::Slice { .. } | StepKind::ToPartial { .. } => false,
        StepKind::Permute { .. } => !same_but_for_size_one(from, &step.to, mesh),
        kind => mesh.set_size(kind.axes()) > 1,
    };
    match moves {
        true => cost.latency + step_bytes(step, from, shape, elem_bytes, mesh) / cost.bandwidth,
        false => 0.0,
    }
}

/// Whether two shardings differ only by axes of size 1, which cut nothing.
fn same_but_for_size_one(a: &Sharding, b: &Sharding, mesh: &Mesh) -> bool {
    let cuts = |it: &Digit| !matches!(*it, Digit::Axis(axis) if mesh.size(axis) == 1);
    let same = |(a, b): (&DimLayout, &DimLayout)| {
        let digits = a.digits().iter().filter(|it| cuts(it));
        a.granule() == b.granule() && digits.eq(b.digits().iter().filter(|it| cuts(it)))
    };
    a.partial == b.partial && a.dims.iter().zip(&b.dims).all(same)
}

/// The cheapest steps from one sharding to another, for a tensor of `shape`.
pub fn reshard(
    from: &Sharding,
    to: &Sharding,
    shape: &[u64],
    elem_bytes: u64,
    mesh: &Mesh,
    cost: &CommCost,
) -> Result<Vec<Step>, PlacementError> {
    from.validate(shape, mesh)?;
    to.validate(shape, mesh)?;
    let cx = Search { to, shape, elem_bytes, mesh, cost };
    Ok(cx.everyday(from).unwrap_or_else(|| cx.search(from)))
}
/// Seconds that the cheapest steps from one sharding to another take.
pub fn reshard_cost(
    from: &Sharding,
    to: &Sharding,
    shape: &[u64],
    elem_bytes: u64,
    mesh: &Mesh,
    cost: &CommCost,
) -> Result<f64, PlacementError> {
    let mut seconds = 0.0;
    let mut at = from;
    let steps = reshard(from, to, shape, elem_bytes, mesh, cost)?;
    for step in &steps {
        seconds += step_cost(step, at, shape, elem_bytes, mesh, cost);
        at = &step.to;
    }
    Ok(seconds)
}
