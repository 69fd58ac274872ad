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
//! moves by heart and searches for the others (Dijkstra over shardings); the cost of a path is the
//! cost of the steps that are emitted. An axis that neither side uses may help: with copies over
//! dp, a large all-reduce over tp is cheaper on a slice by dp, gathered afterwards.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

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

/// How many leading digits two layouts share, as ranges that both cut further.
fn common_base(a: &DimLayout, b: &DimLayout, size: u64, mesh: &Mesh) -> usize {
    let same = a.digits().iter().zip(b.digits()).take_while(|(a, b)| a == b).count();
    (0..=same).rev().find(|&n| a.nests_at(n, size, mesh) && b.nests_at(n, size, mesh)).unwrap_or(0)
}

fn axes_of(digits: &[Digit]) -> impl Iterator<Item = Axis> + '_ {
    digits.iter().filter_map(|it| match *it {
        Digit::Axis(axis) => Some(axis),
        Digit::Block(_) => None,
    })
}

/// How many bytes a rank sends in a step, as a ring does it: all-gather and reduce-scatter
/// `(g-1)/g` of what the group has together, all-reduce twice that, all-to-all `(g-1)/g` of what a
/// rank holds, permute all of it.
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
        let (a, b) = (a.digits().iter().filter(|it| cuts(it)), b.digits().iter());
        a.eq(b.filter(|it| cuts(it)))
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

/// How many moves a search looks at before it settles for the best path known.
const MAX_EDGES: usize = 10_000;

struct Search<'a> {
    to: &'a Sharding,
    shape: &'a [u64],
    elem_bytes: u64,
    mesh: &'a Mesh,
    cost: &'a CommCost,
}

/// A sharding that a search has reached, and how.
struct Node {
    sharding: Sharding,
    cost: Cost,
    before: Option<(usize, StepKind)>,
}

/// Seconds, then number of steps.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Cost(f64, u32);

impl Eq for Cost {}

impl PartialOrd for Cost {
    fn partial_cmp(&self, other: &Cost) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Cost {
    fn cmp(&self, other: &Cost) -> Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

impl Search<'_> {
    /// The moves that need no search, because nothing can beat them.
    fn everyday(&self, from: &Sharding) -> Option<Vec<Step>> {
        let Search { to, shape, mesh, .. } = *self;
        if from == to {
            return Some(Vec::new());
        }
        let step = |kind| vec![Step { kind, to: to.clone() }];
        match classify(from, to, shape, mesh) {
            // Not everyday, and other single collectives may do where most is padding.
            Some(StepKind::Permute { .. }) => None,
            Some(kind) => self.is_best(from, step(kind)),
            None => self.scatter_and_reduce(from),
        }
    }

    /// The steps, if no others can be cheaper. Others have at least two collectives, and must bring
    /// a rank the bytes that it lacks; so padding and idle copies must be worth a latency.
    fn is_best(&self, from: &Sharding, steps: Vec<Step>) -> Option<Vec<Step>> {
        let cost = self.path_cost(from, &steps);
        let least = self.least_bytes(from, steps.first()?.kind) / self.cost.bandwidth;
        let others = 2.0 * self.cost.latency + least;
        (cost <= others * (1.0 + 1e-12)).then_some(steps)
    }

    /// How many bytes a rank must send or receive at least, on average, where a step of this kind
    /// would do, or would do first.
    fn least_bytes(&self, from: &Sharding, kind: StepKind) -> f64 {
        let Search { to, mesh, .. } = *self;
        let (held, wanted) = (self.mean_bytes(from), self.mean_bytes(to));
        let others = |axes| 1.0 - 1.0 / mesh.set_size(axes) as f64;
        match kind {
            StepKind::AllGather { axes, .. } | StepKind::AllToAll { axes, .. } => {
                others(axes) * wanted
            }
            StepKind::ReduceScatter { .. } | StepKind::AllReduce { .. } => {
                let cleared = from.partial_axes().minus(to.partial_axes());
                let scattered = cleared.intersect(to.sharded_axes());
                let sent = others(scattered) * held
                    + 2.0 * others(cleared.minus(scattered)) * held
                        / mesh.set_size(scattered) as f64;
                // With copies over axes that nobody uses, each does its share, and gathers.
                let used = from.sharded_axes().union(from.partial_axes()).union(to.sharded_axes());
                let idle = mesh.all().minus(used);
                sent.min(sent / mesh.set_size(idle) as f64 + others(idle) * wanted)
            }
            StepKind::Permute { .. } | StepKind::Slice { .. } | StepKind::ToPartial { .. } => 0.0,
        }
    }

    /// What a rank holds on average.
    fn mean_bytes(&self, sharding: &Sharding) -> f64 {
        let all = self.shape.iter().map(|&it| it as f64).product::<f64>();
        all * self.elem_bytes as f64 / self.mesh.set_size(sharding.sharded_axes()) as f64
    }

    /// The gradient of a hybrid-sharded parameter: scattered over some of the axes it is partial
    /// over, copied over the others.
    fn scatter_and_reduce(&self, from: &Sharding) -> Option<Vec<Step>> {
        let to = self.to;
        let (op, axes) = from.partial?;
        if to.partial.is_some() {
            return None;
        }
        let scattered = to.sharded_axes().minus(from.sharded_axes());
        if !scattered.is_subset(axes) {
            return None;
        }
        let kept = axes.minus(scattered);
        let middle = to.with_partial(op, kept);
        let dim = match classify(from, &middle, self.shape, self.mesh)? {
            StepKind::ReduceScatter { dim, .. } => dim,
            _ => return None,
        };
        let together = vec![
            Step { kind: StepKind::AllReduce { axes, op }, to: from.without_partial() },
            Step { kind: StepKind::Slice { dim, axes: scattered }, to: to.clone() },
        ];
        let apart = vec![
            Step { kind: StepKind::ReduceScatter { dim, axes: scattered, op }, to: middle },
            Step { kind: StepKind::AllReduce { axes: kept, op }, to: to.clone() },
        ];
        match self.path_cost(from, &together) < self.path_cost(from, &apart) {
            true => self.is_best(from, together),
            false => self.is_best(from, apart),
        }
    }

    fn step_cost(&self, from: &Sharding, step: &Step) -> f64 {
        step_cost(step, from, self.shape, self.elem_bytes, self.mesh, self.cost)
    }

    fn path_cost(&self, from: &Sharding, steps: &[Step]) -> f64 {
        let mut at = from;
        steps.iter().map(|step| self.step_cost(std::mem::replace(&mut at, &step.to), step)).sum()
    }

    /// A* over shardings. Deterministic: ties go to fewer steps, then to what was found first.
    fn search(&self, from: &Sharding) -> Vec<Step> {
        let plain = self.plain_path(from);
        let mut best = Cost(self.path_cost(from, &plain), plain.len() as u32);
        let mut best_found = None;
        let mut nodes = vec![Node { sharding: from.clone(), cost: Cost(0.0, 0), before: None }];
        let mut index: FxHashMap<Sharding, usize> = FxHashMap::default();
        index.insert(from.clone(), 0);
        let mut queue = BinaryHeap::from([Reverse((Cost(0.0, 0), 0, Cost(0.0, 0)))]);
        let mut edges = 0;
        while let Some(Reverse((estimate, at, cost))) = queue.pop() {
            if estimate >= best || edges >= MAX_EDGES {
                break;
            }
            if cost > nodes[at].cost {
                continue;
            }
            let sharding = nodes[at].sharding.clone();
            for to in self.neighbours(&sharding) {
                edges += 1;
                let Some(kind) = classify(&sharding, &to, self.shape, self.mesh) else { continue };
                let step = Step { kind, to };
                let cost = Cost(cost.0 + self.step_cost(&sharding, &step), cost.1 + 1);
                let estimate = Cost(cost.0 + self.at_least(&step.to), cost.1);
                if estimate >= best {
                    continue;
                }
                let node = match index.get(&step.to) {
                    Some(&node) if nodes[node].cost <= cost => continue,
                    Some(&node) => node,
                    None => {
                        index.insert(step.to.clone(), nodes.len());
                        nodes.push(Node { sharding: step.to, cost, before: None });
                        nodes.len() - 1
                    }
                };
                nodes[node].cost = cost;
                nodes[node].before = Some((at, kind));
                if nodes[node].sharding == *self.to {
                    best = cost;
                    best_found = Some(node);
                } else {
                    queue.push(Reverse((estimate, node, cost)));
                }
            }
        }
        let Some(mut at) = best_found else { return plain };
        let mut res = Vec::new();
        while let Some((before, kind)) = nodes[at].before {
            res.push(Step { kind, to: nodes[at].sharding.clone() });
            at = before;
        }
        res.reverse();
        res
    }

    /// Seconds that it takes at least from here to the goal.
    fn at_least(&self, at: &Sharding) -> f64 {
        // Collectives over axes of size 1 are free.
        if self.mesh.axes().any(|it| self.mesh.size(it) == 1) {
            return 0.0;
        }
        let reduced = at.partial_axes().is_subset(self.to.partial_axes());
        let is_prefix = |(a, b): (&DimLayout, &DimLayout)| b.digits().starts_with(a.digits());
        if reduced && at.dims.iter().zip(&self.to.dims).all(is_prefix) {
            return 0.0;
        }
        let missing = self.mean_bytes(self.to) - self.mean_bytes(at);
        self.cost.latency + missing.max(0.0) / self.cost.bandwidth
    }

    /// A path that always exists: reduce, gather what is cut otherwise, cut it anew.
    fn plain_path(&self, from: &Sharding) -> Vec<Step> {
        let mut at = from.clone();
        let mut res = Vec::new();
        let mut go = |next: Sharding| {
            if let Some(kind) = classify(&at, &next, self.shape, self.mesh) {
                at = next.clone();
                res.push(Step { kind, to: next });
            }
        };
        let kept = match (from.partial, self.to.partial) {
            (Some((a, was)), Some((b, is))) if a == b => Some((a, was.intersect(is))),
            _ => None,
        };
        let mut next = match kept {
            Some((op, axes)) => from.with_partial(op, axes),
            None => from.without_partial(),
        };
        go(next.clone());
        for dim in 0..from.ndim() {
            let (a, b) = (&from.dims[dim], &self.to.dims[dim]);
            next = next.with_dim(dim, a.prefix(common_base(a, b, self.shape[dim], self.mesh)));
            go(next.clone());
        }
        for dim in 0..from.ndim() {
            next = next.with_dim(dim, self.to.dims[dim].clone());
            go(next.clone());
        }
        go(self.to.clone());
        res
    }

    /// The shardings one step away that a path could go through.
    fn neighbours(&self, at: &Sharding) -> Vec<Sharding> {
        let mut res = vec![self.to.clone()];
        self.shortened(at, &mut res);
        self.rearranged(at, &mut res);
        self.sliced(at, &mut res);
        self.reduced(at, &mut res);
        if let Some((op, axes)) = self.to.partial
            && at.partial.is_none_or(|(it, _)| it == op)
        {
            let axes = axes.minus(at.sharded_axes()).union(at.partial_axes());
            res.push(at.with_partial(op, axes));
        }
        self.completed(at, &mut res);
        res
    }

    /// Makes copies over the other parts of a refined axis partial as well: where it cuts unevenly
    /// it can be scattered only as a whole.
    fn completed(&self, at: &Sharding, res: &mut Vec<Sharding>) {
        let Some((op, partial)) = at.partial else { return };
        let axes = |group: SmallVec<[Axis; 2]>| group.into_iter().collect::<AxisSet>();
        for group in self.mesh.user_groups().map(axes) {
            let missing = group.minus(partial).minus(at.sharded_axes());
            if !missing.is_empty() && missing != group {
                res.push(at.with_partial(op, partial.union(missing)));
            }
        }
    }

    /// Where the digits of a dimension may be cut off, the whole layout not included.
    fn bases<'a>(&'a self, at: &'a Sharding, dim: usize) -> impl Iterator<Item = usize> + 'a {
        let layout = &at.dims[dim];
        let n = layout.digits().len();
        (0..n).filter(move |&it| layout.nests_at(it, self.shape[dim], self.mesh))
    }

    fn shortened(&self, at: &Sharding, res: &mut Vec<Sharding>) {
        for dim in 0..at.ndim() {
            res.extend(self.bases(at, dim).map(|it| at.with_dim(dim, at.dims[dim].prefix(it))));
        }
    }

    /// The dimensions worth cutting on the way: those that either side cuts, and the largest other.
    fn useful_dims(&self, at: &Sharding) -> SmallVec<[usize; 4]> {
        let cut = |&dim: &usize| !at.dims[dim].is_whole() || !self.to.dims[dim].is_whole();
        let mut res: SmallVec<[usize; 4]> = (0..at.ndim()).filter(cut).collect();
        let others = (0..at.ndim()).filter(|it| !cut(it));
        res.extend(others.max_by_key(|&it| (self.shape[it], Reverse(it))));
        res
    }

    /// `dim` of `at` cut further over `axes`, in the order given, with the blocks that `to` has
    /// there if it agrees.
    fn extended(&self, at: &Sharding, dim: usize, axes: &[Axis]) -> SmallVec<[DimLayout; 2]> {
        let base = &at.dims[dim];
        let mut res = smallvec![base.then(axes.iter().map(|&it| Digit::Axis(it)))];
        let target = self.to.dims[dim].digits();
        if let Some(rest) = target.strip_prefix(base.digits()) {
            let mut seen = 0;
            let is_last = |it: &Digit| {
                seen += usize::from(matches!(it, Digit::Axis(_)));
                seen == axes.len()
            };
            if let Some(end) = rest.iter().position(is_last) {
                let rest = &rest[..=end];
                if rest.len() > axes.len() && axes_of(rest).eq(axes.iter().copied()) {
                    res.push(base.then(rest.iter().copied()));
                }
            }
        }
        res
    }

    /// Gathers some axes off the ends of dimensions, and cuts again over the same axes.
    fn rearranged(&self, at: &Sharding, res: &mut Vec<Sharding>) {
        let dims = self.useful_dims(at);
        let mut bases: Vec<Sharding> = vec![at.clone()];
        for &dim in &dims {
            let shorter: Vec<Sharding> = bases
                .iter()
                .flat_map(|base| {
                    self.bases(at, dim).map(|it| base.with_dim(dim, at.dims[dim].prefix(it)))
                })
                .collect();
            bases.extend(shorter);
        }
        for base in bases {
            let axes = at.sharded_axes().minus(base.sharded_axes());
            self.distributed(&base, axes, &dims, res);
        }
    }

    /// All ways to cut over all of `axes`.
    fn distributed(&self, at: &Sharding, axes: AxisSet, dims: &[usize], res: &mut Vec<Sharding>) {
        if axes.is_empty() {
            res.push(at.clone());
            return;
        }
        for (i, &dim) in dims.iter().enumerate() {
            for taken in axes.subsets() {
                for order in orders(taken) {
                    for layout in self.extended(at, dim, &order) {
                        let next = at.with_dim(dim, layout);
                        self.distributed(&next, axes.minus(taken), &dims[i + 1..], res);
                    }
                }
            }
        }
    }

    fn sliced(&self, at: &Sharding, res: &mut Vec<Sharding>) {
        let used = at.sharded_axes().union(at.partial_axes());
        let free = self.mesh.all().minus(used);
        for dim in self.useful_dims(at) {
            for axes in free.subsets() {
                for order in orders(axes) {
                    res.extend(
                        self.extended(at, dim, &order).into_iter().map(|it| at.with_dim(dim, it)),
                    );
                }
            }
        }
    }

    fn reduced(&self, at: &Sharding, res: &mut Vec<Sharding>) {
        let Some((op, partial)) = at.partial else { return };
        for axes in partial.subsets() {
            let less = at.with_partial(op, partial.minus(axes));
            for dim in self.useful_dims(at) {
                for order in orders(axes) {
                    let layouts = self.extended(&less, dim, &order).into_iter();
                    res.extend(layouts.map(|it| less.with_dim(dim, it)));
                }
            }
            res.push(less);
        }
    }
}

/// The axes in every order.
fn orders(axes: AxisSet) -> Vec<SmallVec<[Axis; 4]>> {
    if axes.is_empty() {
        return vec![SmallVec::new()];
    }
    let ending_in = |last: Axis| {
        orders(axes.without(last)).into_iter().map(move |mut it| {
            it.push(last);
            it
        })
    };
    axes.iter().flat_map(ending_in).collect()
}
