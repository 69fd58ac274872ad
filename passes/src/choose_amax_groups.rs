//! `choose-amax-groups`: lets a scale vary over axes over which nothing needs it to agree.
//!
//! An amax comes here as a maximum over all axes that shard its tensor. What must share a scale is what is
//! put together in low precision:
//!
//! * a weight over the axes that shard it, within `weight_mesh`, and over those that gather its codes,
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
use ir::graph::Def;
use ir::ops::{Amax, Granule};
use ir::placement::{AxisSet, Digit, DimLayout, ReduceOp, Sharding};
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
        let uses = Uses::new(graph);
        for node in graph.order.clone() {
            if let Op::Amax(Amax { pieces }) = &graph.nodes[node].op
                && pieces.is_empty()
            {
                split(graph, &uses, node);
            }
        }
        Ok(())
    }
}

/// Where values go.
struct Uses {
    readers: SecondaryMap<Value, SmallVec<[Node; 2]>>,
    /// States that hold a value next.
    states: SecondaryMap<Value, SmallVec<[Value; 1]>>,
    /// The parameter of which a value is the master weight or the next one, possibly cast.
    masters: SecondaryMap<Value, Option<usize>>,
    /// The parameter that a value is as modules read it.
    gathered: SecondaryMap<Value, Option<usize>>,
}

impl Uses {
    fn new(graph: &Graph) -> Uses {
        let mut res = Uses {
            readers: SecondaryMap::new(),
            states: SecondaryMap::new(),
            masters: SecondaryMap::new(),
            gathered: SecondaryMap::new(),
        };
        for &node in &graph.order {
            for &input in &graph.nodes[node].inputs {
                res.readers[input].push(node);
            }
        }
        for (index, param) in graph.params.iter().enumerate() {
            res.masters[param.value] = Some(index);
            if graph.section(param.full) == Section::Forward {
                res.gathered[param.full] = Some(index);
            }
        }
        for store in &graph.stores {
            res.states[store.value].push(store.state);
            if let Some(index) = res.masters[store.state] {
                res.masters[store.value] = Some(index);
            }
        }
        for node in graph.order.iter().map(|&it| &graph.nodes[it]) {
            if let Op::Cast(_) = node.op {
                res.masters[node.results[0]] = res.masters[node.inputs[0]];
            }
        }
        res
    }
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
fn split(graph: &mut Graph, uses: &Uses, amax: Node) {
    let readers = &uses.readers;
    let x = graph.nodes[amax].inputs[0];
    // The amax, as it is made and as it is read: there is a reduction in between.
    let mut values: SmallVec<[Value; 8]> = SmallVec::from_slice(&graph.nodes[amax].results);
    let mut scale = None;
    let mut rounds: SmallVec<[Node; 2]> = SmallVec::new();
    let mut at = 0;
    while let Some(&value) = values.get(at) {
        at += 1;
        for &reader in &readers[value] {
            match graph.nodes[reader].op {
                Op::Reshard(_) => values.extend_from_slice(&graph.nodes[reader].results),
                Op::QuantScale(_) => scale = Some(reader),
                // Its pieces are those of the amax.
                Op::RoundNvFp4(_) if graph.nodes[reader].inputs[0] == x => rounds.push(reader),
                // What has a history is one state, with one scale.
                _ => return,
            }
        }
    }
    let scales: SmallVec<[Value; 2]> =
        scale.map_or(SmallVec::new(), |it| graph.nodes[it].results.clone());
    let quantized: SmallVec<[Node; 4]> = match scales.first() {
        Some(&factor) => {
            let quantize = |it: &&Node| matches!(graph.nodes[**it].op, Op::Quantize(_));
            readers[factor].iter().filter(quantize).copied().collect()
        }
        None => rounds.iter().copied().collect(),
    };
    if quantized.is_empty() {
        return;
    }
    let spread = graph.sharding(x).sharded_axes();
    let free = spread.minus(shared(graph, uses, x, &quantized, graph.nodes[amax].section));
    let Some(pieces) = pieces(graph, x, free) else { return };

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
        for &reader in &readers[value] {
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
}

/// Axes over which the scale of `x` must agree, which `quantized` read.
fn shared(graph: &Graph, uses: &Uses, x: Value, quantized: &[Node], section: Section) -> AxisSet {
    let readers = &uses.readers;
    if let Some(index) = uses.gathered[x] {
        let scope = graph.params[index].scope;
        return graph.scopes[scope].weight_mesh.unwrap_or(graph.weight_mesh);
    }
    if let (Section::Prepare | Section::Update, Some(index)) = (section, uses.masters[x]) {
        let param = &graph.params[index];
        let declared = graph.scopes[param.scope].weight_mesh.unwrap_or(graph.weight_mesh);
        let stored = graph.sharding(param.compute).sharded_axes();
        return declared.union(stored.minus(graph.sharding(param.full).sharded_axes()));
    }
    // Follows the codes to where they are multiplied.
    let mut res = AxisSet::EMPTY;
    let mut stack: SmallVec<[Value; 8]> = SmallVec::new();
    for &node in quantized {
        stack.extend_from_slice(&graph.nodes[node].results);
    }
    while let Some(codes) = stack.pop() {
        for &reader in &readers[codes] {
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
        let layout = DimLayout::new(digits);
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
