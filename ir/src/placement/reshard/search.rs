//! The cheapest path between two shardings: by heart where it is plain, else A* over shardings.
//!
//! Moves that are worth a try cut, uncut or rearrange the ends of dimensions. Lower bounds (a latency,
//! and the bytes that a rank lacks) keep the search small; a cap on moves keeps it bounded, with a
//! path that always exists to fall back on.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use super::super::layout::{Digit, DimLayout};
use super::super::mesh::{Axis, AxisSet, Mesh};
use super::super::sharding::Sharding;
use super::{CommCost, Step, StepKind, axes_of, classify, common_base, step_cost};

/// How many moves a search looks at before it settles for the best path known.
const MAX_EDGES: usize = 10_000;

/// Up to how many axes at once a search tries in every order: what one move does to more axes than
/// that, it does in mesh order or in that of the goal.
const FEW_AXES: usize = 4;

/// One question: the way to `to`.
pub(super) struct Search<'a> {
    pub(super) to: &'a Sharding,
    pub(super) shape: &'a [u64],
    pub(super) elem_bytes: u64,
    pub(super) mesh: &'a Mesh,
    pub(super) cost: &'a CommCost,
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
    pub(super) fn everyday(&self, from: &Sharding) -> Option<Vec<Step>> {
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

    /// The steps, if no others can be cheaper, and always between layouts in granules. Others have at
    /// least two collectives, and must bring a rank the bytes that it lacks; so padding and idle copies
    /// must be worth a latency. The padding that HSDP reduces of granules is not: a weight is moved in a
    /// batch with others, to which each step would add one.
    fn is_best(&self, from: &Sharding, steps: Vec<Step>) -> Option<Vec<Step>> {
        let in_granules = |it: &Sharding| it.dims.iter().any(|it| it.granule() != 1);
        if in_granules(from) || in_granules(self.to) {
            return Some(steps);
        }
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
    pub(super) fn search(&self, from: &Sharding) -> Vec<Step> {
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
            let (size, mesh) = (self.shape[dim], self.mesh);
            next = next.with_dim(dim, a.prefix(common_base(a, b, size, mesh), size, mesh));
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

    /// A dimension with its digits cut off where that may be, the whole layout not included.
    fn bases<'a>(&'a self, at: &'a Sharding, dim: usize) -> impl Iterator<Item = DimLayout> + 'a {
        let (layout, size, mesh) = (&at.dims[dim], self.shape[dim], self.mesh);
        let n = layout.digits().len();
        let nests = move |it: &usize| layout.nests_at(*it, size, mesh);
        (0..n).filter(nests).map(move |it| layout.prefix(it, size, mesh))
    }

    fn shortened(&self, at: &Sharding, res: &mut Vec<Sharding>) {
        for dim in 0..at.ndim() {
            res.extend(self.bases(at, dim).map(|it| at.with_dim(dim, it)));
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

    /// `dim` of `at` cut further over `axes`, in the order given, with the blocks and the granule
    /// that `to` has there if it agrees.
    fn extended(&self, at: &Sharding, dim: usize, axes: &[Axis]) -> SmallVec<[DimLayout; 2]> {
        let (base, target) = (&at.dims[dim], &self.to.dims[dim]);
        let plain = base.then(axes.iter().map(|&it| Digit::Axis(it)));
        let mut res = smallvec![match target.digits().starts_with(plain.digits()) {
            true => plain.in_granules(target.granule()),
            false => plain,
        }];
        if let Some(rest) = target.digits().strip_prefix(base.digits()) {
            let mut seen = 0;
            let is_last = |it: &Digit| {
                seen += usize::from(matches!(it, Digit::Axis(_)));
                seen == axes.len()
            };
            if let Some(end) = rest.iter().position(is_last) {
                let rest = &rest[..=end];
                if rest.len() > axes.len() && axes_of(rest).eq(axes.iter().copied()) {
                    res.push(base.then(rest.iter().copied()).in_granules(target.granule()));
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
            let few = |it: &Sharding| at.sharded_axes().minus(it.sharded_axes()).len() <= FEW_AXES;
            let shorter: Vec<Sharding> = bases
                .iter()
                .flat_map(|base| self.bases(at, dim).map(|it| base.with_dim(dim, it)))
                .filter(few)
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
            for taken in choices(axes) {
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
            for axes in choices(free) {
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
        for axes in choices(partial) {
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

/// The subsets worth a try: all of a few axes; of many, each alone and all together.
fn choices(axes: AxisSet) -> impl Iterator<Item = AxisSet> {
    let few = axes.len() <= FEW_AXES;
    axes.subsets().filter(move |&it| few || it.len() == 1 || it == axes)
}

/// Few axes in every order, many in mesh order.
fn orders(axes: AxisSet) -> Vec<SmallVec<[Axis; 4]>> {
    if axes.is_empty() || axes.len() > FEW_AXES {
        return vec![axes.iter().collect()];
    }
    let ending_in = |last: Axis| {
        orders(axes.without(last)).into_iter().map(move |mut it| {
            it.push(last);
            it
        })
    };
    axes.iter().flat_map(ending_in).collect()
}
