//! `choose-amax-groups`: lets a scale vary over axes over which nothing needs it to agree.
//!
//! An amax comes here as a maximum over all axes that shard its tensor. What must share a scale is what is
//! put together in low precision:
//!
//! * a weight over the axes that shard it, within `weight_mesh` if that is declared, and over those that
//!   gather its codes,
//! * an activation or a gradient under current scaling over the axes that gather its codes (sequence
//!   parallelism: tp), and no others,
//! * what has a history over all axes: it is one state.
//!
//! Over the other axes the tensor falls into pieces with scales of their own, and the maximum over them goes:
//!
//! ```text
//! %x                    [dp, tp, _]                 gathered over tp
//! %x.amax = amax %x     [] max(dp, tp)       ->     amax(pieces:[(0,2)]) %x      [dp] max(tp)
//! ```

use cranelift_entity::SecondaryMap;
use ir::graph::{Def, WeightMeshLint, WeightMeshProblem};
use ir::ops::{Amax, Granule};
use ir::placement::{Axis, AxisSet, Digit, DimLayout, ReduceOp, Sharding};
use ir::{Graph, Node, Op, Phase, Section, Shape, Value};
use smallvec::SmallVec;

use crate::{Pass, PassError};

/// See the [module docs](self).
pub struct ChooseAmaxGroups;

impl Pass<Graph> for ChooseAmaxGroups {
    fn name(&self) -> &'static str {
        "choose-amax-groups"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Sharded, Phase::Sharded)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        if !graph.order.iter().any(|&it| matches!(graph.nodes[it].op, Op::Amax(_))) {
            return Ok(());
        }
        let uses = Uses::of(graph);
        let mut lints = Lints::default();
        for node in graph.order.clone() {
            if let Op::Amax(Amax { pieces }) = &graph.nodes[node].op
                && pieces.is_empty()
            {
                let group = split(graph, &uses, node);
                lints.look_at(graph, &uses, node, group);
            }
        }
        graph.weight_mesh_lints = lints.finish(graph);
        Ok(())
    }
}

/// What reads, stores and is a value.
struct Uses {
    readers: SecondaryMap<Value, SmallVec<[Node; 2]>>,
    /// States that take a value in.
    states: SecondaryMap<Value, SmallVec<[Value; 1]>>,
    /// The parameter, by index, whose weight a value is: the present master, the next, a cast of one, or what is gathered.
    param: SecondaryMap<Value, Option<usize>>,
}

impl Uses {
    fn of(graph: &Graph) -> Uses {
        let mut res = Uses {
            readers: SecondaryMap::new(),
            states: SecondaryMap::new(),
            param: SecondaryMap::new(),
        };
        for &node in &graph.order {
            for &input in &graph.nodes[node].inputs {
                res.readers[input].push(node);
            }
        }
        for (index, param) in graph.params.iter().enumerate() {
            res.param[param.value] = Some(index);
            res.param[param.full] = Some(index);
        }
        for store in &graph.stores {
            res.states[store.value].push(store.state);
            if graph.values[store.state].def == Def::Param {
                res.param[store.value] = res.param[store.state];
            }
        }
        for node in graph.order.iter().map(|&it| &graph.nodes[it]) {
            if let Op::Cast(_) = node.op {
                let of = res.param[node.inputs[0]];
                res.param[node.results[0]] = res.param[node.results[0]].or(of);
            }
        }
        res
    }
}

/// Why a scale agrees over the axes that it agrees over.
struct Group {
    /// Axes over which it does not.
    varies: AxisSet,
    /// Axes over which codes are put together.
    moved: AxisSet,
    /// It is that of a history.
    history: bool,
}

/// Pieces of a tensor: dims of it, how many along each, and which axes spread them.
struct Pieces {
    dims: Vec<usize>,
    counts: Shape,
    layouts: Vec<DimLayout>,
}

impl Pieces {
    fn axes(&self) -> AxisSet {
        self.layouts.iter().fold(AxisSet::EMPTY, |res, it| res.union(it.axis_set()))
    }

    fn sharding(&self) -> Sharding {
        let res = Sharding::replicated(self.dims.len());
        self.layouts.iter().enumerate().fold(res, |res, (i, it)| res.with_dim(i, it.clone()))
    }
}

/// Lets the scale that `amax` makes vary over what it may.
fn split(graph: &mut Graph, uses: &Uses, amax: Node) -> Group {
    let x = graph.nodes[amax].inputs[0];
    let history = Group { varies: AxisSet::EMPTY, moved: AxisSet::EMPTY, history: true };
    // The amax, as it is made and as it is read: there is a reduction in between.
    let mut values: SmallVec<[Value; 8]> = SmallVec::from_slice(&graph.nodes[amax].results);
    let mut scale = None;
    let mut rounds: SmallVec<[Node; 2]> = SmallVec::new();
    let mut at = 0;
    while let Some(&value) = values.get(at) {
        at += 1;
        for &reader in &uses.readers[value] {
            match graph.nodes[reader].op {
                Op::Reshard(_) => values.extend_from_slice(&graph.nodes[reader].results),
                Op::QuantScale(_) => scale = Some(reader),
                // Its pieces are those of the amax.
                Op::RoundNvFp4(_) if graph.nodes[reader].inputs[0] == x => rounds.push(reader),
                // What has a history is one state, with one scale.
                _ => return history,
            }
        }
    }
    let scales: SmallVec<[Value; 2]> =
        scale.map_or(SmallVec::new(), |it| graph.nodes[it].results.clone());
    let quantized: SmallVec<[Node; 2]> = match scales.first() {
        Some(&factor) => {
            let quantize = |it: &&Node| matches!(graph.nodes[**it].op, Op::Quantize(_));
            uses.readers[factor].iter().filter(quantize).copied().collect()
        }
        None => rounds,
    };
    if quantized.is_empty() {
        return history;
    }
    let spread = graph.sharding(x).sharded_axes();
    let moved = moved_over(graph, uses, x, &quantized);
    let shared = uses.param[x].map_or(AxisSet::EMPTY, |it| weight_mesh(graph, it));
    let free = spread.minus(moved).minus(shared);
    let Some(pieces) = pieces(graph, x, free) else {
        return Group { varies: AxisSet::EMPTY, moved, history: false };
    };

    graph.nodes[amax].op =
        Amax { pieces: pieces.dims.iter().copied().zip(pieces.counts.iter().copied()).collect() }
            .into();
    let whole = pieces.sharding();
    let group = spread.minus(pieces.axes());
    let states: SmallVec<[Value; 2]> =
        scales.iter().flat_map(|&it| uses.states[it].iter().copied()).collect();
    for &value in values.iter().chain(&scales).chain(&states) {
        graph.values[value].ty.shape = pieces.counts.clone();
        graph.values[value].sharding = Some(whole.clone());
    }
    if !group.is_empty() {
        let partial = whole.with_partial(ReduceOp::Max, group);
        graph.values[values[0]].sharding = Some(partial);
    }
    for &node in &quantized {
        match &mut graph.nodes[node].op {
            Op::Quantize(op) => op.pieces.clone_from(&pieces.dims),
            Op::RoundNvFp4(op) => op.pieces.clone_from(&pieces.dims),
            other => unreachable!("`{}` reads no scale", other.to_text()),
        }
    }
    for &value in states.iter().chain(&scales) {
        for &reader in &uses.readers[value] {
            let data = &graph.nodes[reader];
            let dims = [0, 1].map(|operand| {
                (data.inputs.get(operand + 2) == Some(&value))
                    .then(|| dims_of(graph, data.inputs[operand], &pieces.dims))
            });
            if let Op::QuantMatmul(op) = &mut graph.nodes[reader].op {
                let [a, b] = dims.map(|it| it.map(Granule::Tensor));
                op.a = a.unwrap_or_else(|| op.a.clone());
                op.b = b.unwrap_or_else(|| op.b.clone());
            }
        }
    }
    Group { varies: pieces.axes(), moved, history: false }
}

/// Axes over which the scales of a parameter must agree if they shard it.
fn weight_mesh(graph: &Graph, param: usize) -> AxisSet {
    declared(graph, param).unwrap_or(graph.mesh.all())
}

fn declared(graph: &Graph, param: usize) -> Option<AxisSet> {
    graph.scopes[graph.params[param].scope].weight_mesh.or(graph.weight_mesh)
}

/// Axes over which `x` is put together on the way to `quantized`, and what these make on the way to where it is
/// multiplied.
fn moved_over(graph: &Graph, uses: &Uses, x: Value, quantized: &[Node]) -> AxisSet {
    let mut res = AxisSet::EMPTY;
    let mut stack: SmallVec<[Value; 8]> = SmallVec::new();
    for &node in quantized {
        res = res.union(moved(graph, x, graph.nodes[node].inputs[0]));
        stack.extend_from_slice(&graph.nodes[node].results);
    }
    while let Some(codes) = stack.pop() {
        stack.extend_from_slice(&uses.states[codes]);
        for &reader in &uses.readers[codes] {
            let data = &graph.nodes[reader];
            match data.op {
                Op::Reshard(_) => res = res.union(moved(graph, codes, data.results[0])),
                Op::Transpose(_) => (),
                _ => continue,
            }
            stack.push(data.results[0]);
        }
    }
    res
}

/// Axes that cut a dim of `from` and no longer cut it in `to`.
fn moved(graph: &Graph, from: Value, to: Value) -> AxisSet {
    let dims = graph.sharding(from).dims.iter().zip(&graph.sharding(to).dims);
    dims.fold(AxisSet::EMPTY, |res, (a, b)| res.union(a.axis_set().minus(b.axis_set())))
}

/// The pieces into which `axes` cut `x`: along its first and its last dim, which GEMMs can have in pieces, and
/// where they cut first.
fn pieces(graph: &Graph, x: Value, axes: AxisSet) -> Option<Pieces> {
    let (shape, sharding) = (&graph.ty(x).shape, graph.sharding(x));
    let mut res = Pieces { dims: Vec::new(), counts: Shape::new(), layouts: Vec::new() };
    for dim in 0..shape.len() {
        if dim > 0 && dim + 1 < shape.len() {
            continue;
        }
        let free = |it: &&Digit| matches!(it, Digit::Axis(axis) if axes.contains(*axis));
        let digits = sharding.dims[dim].digits().iter().take_while(free).copied();
        let layout = DimLayout::new(digits).in_granules(sharding.dims[dim].granule());
        if !layout.is_whole() && layout.divides(shape[dim], &graph.mesh) {
            res.dims.push(dim);
            res.counts.push(graph.mesh.set_size(layout.axis_set()));
            res.layouts.push(layout);
        }
    }
    (!res.dims.is_empty()).then_some(res)
}

/// Where dims of what was quantized are in `codes`, a copy of it.
fn dims_of(graph: &Graph, codes: Value, dims: &[usize]) -> Vec<usize> {
    let Def::Result { node, .. } = graph.values[codes].def else { return dims.to_vec() };
    let data = &graph.nodes[node];
    match &data.op {
        Op::Reshard(_) => dims_of(graph, data.inputs[0], dims),
        Op::Transpose(op) => {
            let at = |dim: usize| op.perm.iter().position(|&it| it == dim).expect("a permutation");
            dims_of(graph, data.inputs[0], dims).into_iter().map(at).collect()
        }
        _ => dims.to_vec(),
    }
}

/// What there is to say about declared weight meshes.
#[derive(Default)]
struct Lints {
    found: Vec<WeightMeshLint>,
    /// Each declared mesh, the axes that shard its weights, and these.
    declared: Vec<(AxisSet, AxisSet, Vec<String>)>,
}

impl Lints {
    /// Compares what is declared for the weight of `amax`, if it is that of one, with what became of it.
    fn look_at(&mut self, graph: &Graph, uses: &Uses, amax: Node, group: Group) {
        let data = &graph.nodes[amax];
        let Some(param) = uses.param[data.inputs[0]] else { return };
        let Some(weight_mesh) = declared(graph, param) else { return };
        // What the optimizer makes is as what it replaces.
        if data.section == Section::Update {
            return;
        }
        let name = &graph.values[graph.params[param].value].name;
        let sharded = graph.sharding(data.inputs[0]).sharded_axes();
        match self.declared.iter_mut().find(|it| it.0 == weight_mesh) {
            Some(it) => {
                it.1 = it.1.union(sharded);
                it.2.push(name.clone());
            }
            None => self.declared.push((weight_mesh, sharded, vec![name.clone()])),
        }
        let missed = sharded.minus(weight_mesh);
        let gathered = missed.intersect(group.moved);
        let rest = missed.minus(group.varies).minus(gathered);
        let kept =
            if group.history { WeightMeshProblem::History } else { WeightMeshProblem::Uneven };
        for (problem, axes) in [
            (WeightMeshProblem::Varies, group.varies),
            (WeightMeshProblem::Gathered, gathered),
            (kept, rest),
        ] {
            self.add(WeightMeshLint {
                problem,
                axes,
                weight_mesh,
                sharded,
                weights: vec![name.clone()],
            });
        }
    }

    /// Adds a lint, to the one that says the same of other weights if there is one.
    fn add(&mut self, lint: WeightMeshLint) {
        if lint.axes.is_empty() {
            return;
        }
        let key = |it: &WeightMeshLint| (it.problem as u8, it.axes, it.weight_mesh, it.sharded);
        match self.found.iter_mut().find(|it| key(it) == key(&lint)) {
            Some(it) => it.weights.extend(lint.weights),
            None => self.found.push(lint),
        }
    }

    fn finish(mut self, graph: &Graph) -> Vec<WeightMeshLint> {
        let mesh = &graph.mesh;
        for (weight_mesh, sharded, weights) in std::mem::take(&mut self.declared) {
            // A part of an axis of the user's mesh stands for all of it.
            let user = |it| mesh.axes[usize::from(it)].user_name();
            let known = |it: &Axis| sharded.iter().any(|other| user(it.0) == user(other.0));
            let axes = weight_mesh.iter().filter(|it| !known(it)).collect();
            let problem = WeightMeshProblem::Replicas;
            self.add(WeightMeshLint { problem, axes, weight_mesh, sharded, weights });
        }
        self.found
    }
}
