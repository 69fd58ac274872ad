//! `propagate-shardings`: gives every value one sharding, and makes each movement a `reshard` node.
//!
//! One walk in program order. At each node the candidates are the ways to shard the op's factors that
//! its operands, its pinned results and its primal suggest; the cheapest wins, counting what must be
//! moved, what a partial result will cost later, and the work that one rank does. A value that was
//! moved is kept as a copy, so that a second reader (or its gradient) moves nothing; nor does one that reads
//! its transpose. Weights and data stay where the user put them: moving one costs `PLACED_PENALTY` times
//! as much. All moves are reported in [`Graph::moves`].
//!
//! A walk prices one node at a time and does not see the consequences of a choice. If it moved what the user placed and
//! ranks compute products alike, a second walk moves nothing that the user placed unless it must. Both programs are
//! priced as a whole ([`ir::cost`]), with what ranks repeat in the forward and the backward pass, and the cheaper one
//! stays:
//!
//! ```text
//! 8B on tp=4       q = x Wq^T, x of 458,752 tokens               attention, both passes
//! first walk       gathers Wq (32 MiB) rather than x (3.5 GiB)   all heads on every rank
//! second walk      gathers x, for Wq, Wk and Wv                  a quarter of the heads
//! ```
//!
//! Values that start the program without a sharding (inputs of a model that annotates only some
//! values) get one first, from a walk against program order; accumulators follow what they sum.

use std::cell::RefCell;
use std::hash::{DefaultHasher, Hash, Hasher};

use cranelift_entity::SecondaryMap;
use ir::cost::{Target, op_seconds, work_seconds};
use ir::graph::{Def, Move, NewNode, Store, ValueData};
use ir::ops::{Assignment, Factors, Linear, Reshard};
use ir::placement::{self, AxisSet, CommCost, Mesh, ReduceOp, Sharding};
use ir::{Builder, Graph, Node, Op, Phase, Section, TensorType, Value};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::{Pass, PassError};

/// How much dearer it is to move what the user placed, a weight or a batch of data, than an activation
/// of the same size.
const PLACED_PENALTY: f64 = 100.0;
/// The same penalty for the second walk, which moves it only if nothing else is legal.
const STAYS_PENALTY: f64 = 1e9;
/// What a partial result costs later, as a share of its all-reduce: a reduce-scatter may do, but no
/// less.
const LATER_SHARE: f64 = 0.5;

/// See the [module docs](self).
pub struct PropagateShardings;

impl Pass<Graph> for PropagateShardings {
    fn name(&self) -> &'static str {
        "propagate-shardings"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Logical, Phase::Sharded)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        for store in graph.stores.clone() {
            pin_stored(graph, store);
        }
        for (_, value) in graph.results.clone() {
            let ndim = graph.ty(value).ndim();
            let data = &mut graph.values[value];
            data.sharding.get_or_insert_with(|| Sharding::replicated(ndim));
            data.pinned = true;
        }
        settle_leaves(graph);
        let before = Before::of(graph);
        let prices = Prices::default();
        walk(graph, &prices, PLACED_PENALTY)?;
        if graph.moves.iter().any(|it| it.placed) && repeats(graph) {
            let first = graph.clone();
            before.restore(graph);
            walk(graph, &prices, STAYS_PENALTY)?;
            if prices.of_step(&first)? <= prices.of_step(graph)? {
                *graph = first;
            }
        }
        graph.phase = Phase::Sharded;
        Ok(())
    }
}

/// The part of a graph that a walk changes; besides, a walk appends nodes, values and moves. It is smaller than a copy
/// of the graph, which few models need.
struct Before {
    order: Vec<Node>,
    /// Operands of each node.
    inputs: Vec<SmallVec<[Value; 3]>>,
    /// Results of each node.
    results: Vec<SmallVec<[Value; 2]>>,
    n_values: usize,
    /// Values without a sharding, and whether they are pinned.
    open: Vec<(Value, bool)>,
    n_moves: usize,
}

impl Before {
    fn of(graph: &Graph) -> Before {
        let open = graph.values.iter().filter(|it| it.1.sharding.is_none());
        Before {
            order: graph.order.clone(),
            inputs: graph.nodes.values().map(|it| it.inputs.clone()).collect(),
            results: graph.nodes.values().map(|it| it.results.clone()).collect(),
            n_values: graph.values.len(),
            open: open.map(|it| (it.0, it.1.pinned)).collect(),
            n_moves: graph.moves.len(),
        }
    }

    /// Undoes a walk.
    fn restore(self, graph: &mut Graph) {
        let (nodes, values) = (std::mem::take(&mut graph.nodes), std::mem::take(&mut graph.values));
        graph.nodes = nodes.into_iter().take(self.inputs.len()).map(|it| it.1).collect();
        graph.values = values.into_iter().take(self.n_values).map(|it| it.1).collect();
        let ends = self.inputs.into_iter().zip(self.results);
        for ((node, data), ends) in graph.nodes.iter_mut().zip(ends) {
            (data.inputs, data.results) = ends;
            for (index, &result) in (0..).zip(&data.results) {
                graph.values[result].def = Def::Result { node, index };
            }
        }
        for (value, pinned) in self.open {
            let data = &mut graph.values[value];
            (data.sharding, data.pinned) = (None, pinned);
        }
        graph.order = self.order;
        graph.moves.truncate(self.n_moves);
    }
}

/// Returns true if several ranks compute the same products.
fn repeats(graph: &Graph) -> bool {
    graph.order.iter().any(|&node| {
        let data = &graph.nodes[node];
        let shapes = |values: &[Value]| -> SmallVec<[&[u64]; 4]> {
            values.iter().map(|&it| &graph.ty(it).shape[..]).collect()
        };
        let values = data.inputs.iter().chain(&data.results);
        data.op.flops(&shapes(&data.inputs), &shapes(&data.results)) > 0
            && !placement::axes_alike(values.map(|&it| graph.sharding(it)), &graph.mesh).is_empty()
    })
}

/// Lays out all nodes, in program order, where moving what the user placed costs so many times as much.
fn walk(graph: &mut Graph, prices: &Prices, placed_penalty: f64) -> Result<(), PassError> {
    let terms = terms(graph);
    let order = std::mem::take(&mut graph.order);
    let mut placed = SecondaryMap::new();
    for param in &graph.params {
        placed[param.full] = true;
    }
    for (value, data) in graph.values.iter() {
        placed[value] |= data.def == Def::Input;
    }
    let (builder, copies, known) = (Builder::new(graph), SecondaryMap::new(), FxHashMap::default());
    let mut walk = Walk { builder, placed, placed_penalty, copies, terms, known, prices };
    order.into_iter().try_for_each(|it| walk.node(it))
}

/// The prices of moves and ops.
struct Prices {
    target: &'static Target,
    cost: CommCost,
    /// Seconds of moves between shardings of a type; each is searched for once.
    moves: RefCell<FxHashMap<u64, f64>>,
}

impl Default for Prices {
    fn default() -> Prices {
        let (target, cost) = (Target::reference(), CommCost::default());
        Prices { target, cost, moves: RefCell::default() }
    }
}

impl Prices {
    /// Seconds of the cheapest way from one sharding to another.
    fn of_move(
        &self,
        from: &Sharding,
        to: &Sharding,
        ty: &TensorType,
        mesh: &Mesh,
    ) -> Result<f64, PassError> {
        if from == to {
            return Ok(0.0);
        }
        let key = hash(&(from, to, ty));
        if let Some(&seconds) = self.moves.borrow().get(&key) {
            return Ok(seconds);
        }
        let bytes = ty.dtype.bytes();
        let seconds =
            placement::reshard_cost(from, to, &ty.shape, bytes, mesh, &self.cost).map_err(
                |it| PassError::Failed { code: "PL0401", message: it.to_string(), subject: None },
            )?;
        self.moves.borrow_mut().insert(key, seconds);
        Ok(seconds)
    }

    /// Seconds that a rank computes and moves in a step of a program in which every value has a sharding.
    fn of_step(&self, graph: &Graph) -> Result<f64, PassError> {
        let local = |values: &[Value]| -> Types {
            values
                .iter()
                .map(|&it| local_type(graph.ty(it), graph.sharding(it), &graph.mesh))
                .collect()
        };
        let mut res = 0.0;
        for &node in &graph.order {
            let data = &graph.nodes[node];
            let seconds = match data.op {
                Op::Reshard(_) => {
                    let (from, to) = (data.inputs[0], data.results[0]);
                    let (from, to) = (graph.sharding(from), graph.sharding(to));
                    self.of_move(from, to, graph.ty(data.inputs[0]), &graph.mesh)?
                }
                _ => op_seconds(&data.op, &local(&data.inputs), &local(&data.results), self.target),
            };
            let times = match data.section {
                Section::Forward | Section::Backward => graph.micro_batches,
                Section::Prepare | Section::Update => 1,
            };
            res += f64::from(times) * seconds;
        }
        Ok(res)
    }
}

/// Types with the shapes that one rank holds.
type Types = SmallVec<[TensorType; 8]>;

fn local_type(ty: &TensorType, sharding: &Sharding, mesh: &Mesh) -> TensorType {
    TensorType { dtype: ty.dtype, shape: sharding.local_shape(&ty.shape, mesh) }
}

/// By contribution to a gradient: how many are added up, to be reduced once if all are partial.
fn terms(graph: &Graph) -> SecondaryMap<Value, u32> {
    let mut res = SecondaryMap::new();
    for &node in &graph.order {
        let data = &graph.nodes[node];
        let like = |it: Value| graph.values[it].like;
        let adds = (0..data.inputs.len()).all(|it| data.op.without(it).is_some());
        if adds && like(data.results[0]).is_some() {
            let alike = data.inputs.iter().all(|&it| like(it) == like(data.results[0]));
            let n = if alike { data.inputs.len() as u32 } else { 1 };
            data.inputs.iter().for_each(|&it| res[it] = n);
        }
    }
    res
}

/// What is stored to a state lives where the state does.
fn pin_stored(graph: &mut Graph, store: Store) {
    if let (Some(to), None) =
        (graph.values[store.state].sharding.clone(), &graph.values[store.value].sharding)
    {
        graph.values[store.value].sharding = Some(to);
        graph.values[store.value].pinned = true;
    }
}

/// Gives inputs, parameters and states without a sharding one that suits their readers.
fn settle_leaves(graph: &mut Graph) {
    let is_open = |it: &ValueData| it.sharding.is_none() && it.like.is_none() && is_leaf(it.def);
    let open = graph.values.values().any(is_open);
    if !open {
        return;
    }
    let mut wishes: SecondaryMap<Value, Option<Sharding>> = SecondaryMap::new();
    for &node in graph.order.iter().rev() {
        let data = &graph.nodes[node];
        let factors = factors(graph, node);
        let mut assignment = factors.nothing();
        let known = |value: Value| graph.values[value].sharding.as_ref().or(wishes[value].as_ref());
        for (&value, dims) in data.results.iter().zip(&factors.results) {
            if let Some(sharding) = known(value) {
                factors.adopt(&mut assignment, dims, sharding, &graph.mesh);
            }
        }
        for (&value, dims) in data.inputs.iter().zip(&factors.inputs) {
            if let Some(sharding) = known(value) {
                factors.adopt(&mut assignment, dims, sharding, &graph.mesh);
            }
        }
        for (i, &value) in data.inputs.iter().enumerate() {
            if graph.values[value].sharding.is_none() && wishes[value].is_none() {
                wishes[value] = factors.input(i, &assignment, &graph.mesh);
            }
        }
    }
    for (value, data) in graph.values.iter_mut() {
        if is_open(data) {
            let wish = wishes[value].take();
            data.sharding = Some(wish.unwrap_or_else(|| Sharding::replicated(data.ty.ndim())));
        }
    }
}

fn is_leaf(def: Def) -> bool {
    match def {
        Def::Input | Def::Param | Def::State | Def::Sum => true,
        Def::Result { .. } => false,
    }
}

fn factors(graph: &Graph, node: Node) -> Factors {
    let data = &graph.nodes[node];
    let types = |values: &[Value]| -> SmallVec<[&TensorType; 4]> {
        values.iter().map(|&it| graph.ty(it)).collect()
    };
    data.op.factors(&types(&data.inputs), &types(&data.results))
}

struct Walk<'a> {
    builder: Builder<'a>,
    /// Gathered parameters and data, their transposes and their codes.
    placed: SecondaryMap<Value, bool>,
    /// The factor by which moving these is dearer.
    placed_penalty: f64,
    /// Other layouts of each value that exist already.
    copies: SecondaryMap<Value, SmallVec<[Value; 2]>>,
    /// See [`terms`].
    terms: SecondaryMap<Value, u32>,
    /// Choices made, by everything that they depend on: identical layers cost one search.
    known: FxHashMap<u64, Choice>,
    prices: &'a Prices,
}

/// The shardings that a node's op has operands in and makes results in.
#[derive(Clone)]
struct Choice {
    inputs: SmallVec<[Sharding; 4]>,
    results: SmallVec<[Sharding; 2]>,
}

fn hash(it: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    it.hash(&mut hasher);
    hasher.finish()
}

impl Walk<'_> {
    fn node(&mut self, node: Node) -> Result<(), PassError> {
        let graph = &*self.builder.graph;
        if let Op::Reshard(_) = graph.nodes[node].op {
            let (from, to) = (graph.nodes[node].inputs[0], graph.nodes[node].results[0]);
            if graph.values[to].sharding.is_none() {
                self.builder.graph.values[to].sharding = graph.values[from].sharding.clone();
            }
            self.builder.graph.order.push(node);
            return Ok(());
        }
        self.follow(node);
        let key = self.key(node);
        let choice = match self.known.get(&key) {
            Some(choice) => choice.clone(),
            None => {
                let choice = self.search(node)?;
                self.known.insert(key, choice.clone());
                choice
            }
        };
        self.apply(node, choice);
        let data = &self.builder.graph.nodes[node];
        // What others make of a weight is no weight.
        if data.op.is_form() {
            let placed = self.placed[data.inputs[0]];
            data.results.iter().for_each(|&it| self.placed[it] = placed);
        }
        Ok(())
    }

    /// A state without a sharding (an accumulator) is laid out like the value that it follows.
    fn follow(&mut self, node: Node) {
        let graph = &mut *self.builder.graph;
        for input in graph.nodes[node].inputs.clone() {
            let data = &graph.values[input];
            if let (None, Some(like)) = (&data.sharding, data.like) {
                graph.values[input].sharding = graph.values[like].sharding.clone();
                let stores = graph.stores.iter().filter(|it| it.state == input);
                for store in stores.copied().collect::<SmallVec<[Store; 2]>>() {
                    pin_stored(graph, store);
                }
            }
        }
    }

    /// Everything that a choice depends on, hashed.
    fn key(&self, node: Node) -> u64 {
        let graph = &*self.builder.graph;
        let data = &graph.nodes[node];
        let mut hasher = DefaultHasher::new();
        data.op.hash(&mut hasher);
        for &input in &data.inputs {
            graph.ty(input).hash(&mut hasher);
            self.placed[input].hash(&mut hasher);
            graph.sharding(input).hash(&mut hasher);
            self.copies[input].len().hash(&mut hasher);
            for &copy in &self.copies[input] {
                graph.sharding(copy).hash(&mut hasher);
            }
            for &copy in self.permuted(input).map_or(&[][..], |it| it.1) {
                graph.sharding(copy).hash(&mut hasher);
            }
        }
        for &result in &data.results {
            let value = &graph.values[result];
            value.ty.hash(&mut hasher);
            value.sharding.hash(&mut hasher);
            value.like.map(|it| &graph.values[it].sharding).hash(&mut hasher);
            self.terms[result].hash(&mut hasher);
        }
        hasher.finish()
    }

    /// The cheapest way to shard the node's factors.
    fn search(&self, node: Node) -> Result<Choice, PassError> {
        let factors = &factors(self.builder.graph, node);
        let mut best: Option<(f64, Assignment)> = None;
        for candidate in self.candidates(node, factors) {
            let Some(cost) = self.cost(node, factors, &candidate)? else {
                continue;
            };
            if best.as_ref().is_none_or(|it| cost < it.0) {
                best = Some((cost, candidate));
            }
        }
        let best = best.expect("sharding nothing is always a candidate").1;
        let graph = &*self.builder.graph;
        let (data, mesh) = (&graph.nodes[node], &graph.mesh);
        let inputs = (0..data.inputs.len()).map(|it| factors.input(it, &best, mesh));
        let results = (0..data.results.len()).map(|it| factors.result(it, &best, mesh));
        let choice = inputs.collect::<Option<_>>().zip(results.collect::<Option<_>>());
        let (inputs, results) = choice.expect("the choice was costed");
        Ok(Choice { inputs, results })
    }

    fn candidates(&self, node: Node, factors: &Factors) -> Vec<Assignment> {
        let graph = &*self.builder.graph;
        let data = &graph.nodes[node];
        // Suggestions in the order in which they are listened to.
        let mut sources: SmallVec<[(&ir::ops::Dims, &Sharding); 8]> = SmallVec::new();
        let inputs = || data.inputs.iter().zip(&factors.inputs);
        for placed in [true, false] {
            let of_kind = inputs().filter(|it| self.placed[*it.0] == placed);
            sources.extend(of_kind.map(|(&value, dims)| (dims, graph.sharding(value))));
        }
        for (&value, dims) in data.results.iter().zip(&factors.results) {
            let value = &graph.values[value];
            let like = value.like.and_then(|it| graph.values[it].sharding.as_ref());
            sources.extend(value.sharding.as_ref().into_iter().chain(like).map(|it| (dims, it)));
        }
        // A sum over all parameters has thousands of operands, of few kinds.
        let mut seen = FxHashSet::default();
        sources.retain(|it| seen.insert(*it));
        let mut partials: SmallVec<[AxisSet; 4]> = SmallVec::from_slice(&[AxisSet::EMPTY]);
        if factors.linear == Linear::Joint {
            let sums = data.inputs.iter().filter_map(|&it| graph.sharding(it).partial);
            let sums = sums.filter(|it| it.0 == ReduceOp::Sum).map(|it| it.1);
            let union = sums.fold(AxisSet::EMPTY, AxisSet::union);
            if !union.is_empty() {
                partials.push(union);
            }
        }
        let mut res = Vec::new();
        for &partial in &partials {
            for first in 0..sources.len() {
                let mut candidate = factors.nothing();
                candidate.partial = partial;
                let order =
                    std::iter::once(first).chain((0..sources.len()).filter(|&it| it != first));
                for source in order {
                    let (dims, sharding) = sources[source];
                    factors.adopt(&mut candidate, dims, sharding, &graph.mesh);
                }
                if !res.contains(&candidate) {
                    res.push(candidate);
                }
            }
        }
        let nothing = factors.nothing();
        if !res.contains(&nothing) {
            res.push(nothing);
        }
        res
    }

    /// Seconds that a candidate costs; `None` if an operand or result cannot be laid out like that.
    fn cost(
        &self,
        node: Node,
        factors: &Factors,
        candidate: &Assignment,
    ) -> Result<Option<f64>, PassError> {
        let graph = &*self.builder.graph;
        let data = &graph.nodes[node];
        let mesh = &graph.mesh;
        let mut seconds = 0.0;
        let mut bytes = 0;
        let mut shapes: SmallVec<[ir::Shape; 8]> = SmallVec::new();
        for (i, &input) in data.inputs.iter().enumerate() {
            let Some(needed) = factors.input(i, candidate, mesh) else {
                return Ok(None);
            };
            if self.transpose(input, &needed).is_none() {
                let penalty = if self.placed[input] { self.placed_penalty } else { 1.0 };
                seconds += penalty * self.cheapest(input, &needed)?.1;
            }
            let local = local_type(graph.ty(input), &needed, mesh);
            bytes += local.bytes();
            shapes.push(local.shape);
        }
        for (i, &result) in data.results.iter().enumerate() {
            let Some(natural) = factors.result(i, candidate, mesh) else {
                return Ok(None);
            };
            seconds += match &graph.values[result].sharding {
                Some(pin) => self.seconds(&natural, pin, graph.ty(result))?,
                None => {
                    let whole = natural.without_partial();
                    let later = LATER_SHARE * self.seconds(&natural, &whole, graph.ty(result))?;
                    later / f64::from(self.terms[result].max(1))
                }
            };
            let local = local_type(graph.ty(result), &natural, mesh);
            bytes += local.bytes();
            shapes.push(local.shape);
        }
        let views: SmallVec<[&[u64]; 8]> = shapes.iter().map(|it| it.as_slice()).collect();
        let (inputs, results) = views.split_at(data.inputs.len());
        let flops = data.op.flops(inputs, results);
        Ok(Some(seconds + work_seconds(flops, bytes, self.prices.target)))
    }

    /// The copy of `value` that becomes `needed` for the least, and for how much.
    fn cheapest(&self, value: Value, needed: &Sharding) -> Result<(Value, f64), PassError> {
        let graph = &*self.builder.graph;
        let ty = graph.ty(value);
        let mut best = (value, self.seconds(graph.sharding(value), needed, ty)?);
        for &copy in &self.copies[value] {
            let seconds = self.seconds(graph.sharding(copy), needed, ty)?;
            if seconds < best.1 {
                best = (copy, seconds);
            }
        }
        Ok(best)
    }

    fn seconds(&self, from: &Sharding, to: &Sharding, ty: &TensorType) -> Result<f64, PassError> {
        self.prices.of_move(from, to, ty, &self.builder.graph.mesh)
    }

    /// Lays the node out as chosen: moved operands before it, moved results after it.
    fn apply(&mut self, node: Node, choice: Choice) {
        for (i, needed) in choice.inputs.into_iter().enumerate() {
            let input = self.builder.graph.nodes[node].inputs[i];
            let copy = self.moved(node, input, needed);
            self.builder.graph.nodes[node].inputs[i] = copy;
        }
        self.builder.graph.order.push(node);
        for (i, natural) in choice.results.into_iter().enumerate() {
            let result = self.builder.graph.nodes[node].results[i];
            match self.builder.graph.values[result].sharding.clone() {
                None => self.builder.graph.values[result].sharding = Some(natural),
                Some(pin) if pin == natural => (),
                Some(pin) => {
                    let data = &self.builder.graph.values[result];
                    let (name, ty) =
                        (format!("{}.{}", data.name, suffix(&natural, None)), data.ty.clone());
                    let name = self.builder.unique(&name);
                    let def = Def::Result { node, index: i as u32 };
                    let raw = self.builder.graph.add_leaf(name, ty, def);
                    self.report(result, result, natural.clone(), pin, false);
                    self.builder.graph.values[raw].sharding = Some(natural);
                    self.builder.graph.nodes[node].results[i] = raw;
                    self.reshard(node, raw, result);
                }
            }
        }
    }

    /// `value` laid out as `needed`: itself, a copy, or a new copy.
    fn moved(&mut self, node: Node, value: Value, needed: Sharding) -> Value {
        let graph = &*self.builder.graph;
        if *graph.sharding(value) == needed {
            return value;
        }
        if let Some(&copy) = self.copies[value].iter().find(|&&it| *graph.sharding(it) == needed) {
            return copy;
        }
        if let Some((copy, op)) = self.transpose(value, &needed) {
            return self.transposed(node, value, copy, op, needed);
        }
        let (source, seconds) = self.cheapest(value, &needed).expect("the choice was costed");
        let reader = graph.nodes[node].results[0];
        let (from, placed) = (graph.sharding(source).clone(), self.placed[value] && seconds > 0.0);
        self.report(value, reader, from, needed.clone(), placed);
        let graph = &*self.builder.graph;
        let data = &graph.values[value];
        let name = format!("{}.{}", data.name, suffix(graph.sharding(source), Some(&needed)));
        let ty = data.ty.clone();
        let name = self.builder.unique(&name);
        let def = Def::Result { node, index: 0 };
        let copy = self.builder.graph.add_leaf(name, ty, def);
        self.builder.graph.values[copy].sharding = Some(needed);
        self.reshard(node, source, copy);
        self.copies[value].push(copy);
        copy
    }

    /// The op that made `value` by permuting dimensions, if one did, with copies of its operand: to permute one of those
    /// moves nothing.
    fn permuted(&self, value: Value) -> Option<(&Op, &[Value])> {
        let graph = &*self.builder.graph;
        let data = &graph.nodes[graph.producer(value)?];
        data.op.permutation()?;
        Some((&data.op, &self.copies[data.inputs[0]]))
    }

    /// A copy whose transpose is `value` laid out as `needed`, which `value` itself is not.
    fn transpose(&self, value: Value, needed: &Sharding) -> Option<(Value, Op)> {
        let graph = &*self.builder.graph;
        if graph.sharding(value) == needed || needed.partial.is_some() {
            return None;
        }
        let (op, copies) = self.permuted(value)?;
        let perm = op.permutation()?;
        let is = |copy: &&Value| {
            let sharding = graph.sharding(**copy);
            let dims = perm.iter().map(|&it| &sharding.dims[it]);
            sharding.partial.is_none() && dims.eq(&needed.dims)
        };
        Some((*copies.iter().find(is)?, op.clone()))
    }

    /// `value` laid out as `sharding`, the transpose of `copy`, where and when `node` runs.
    fn transposed(
        &mut self,
        node: Node,
        value: Value,
        copy: Value,
        op: Op,
        sharding: Sharding,
    ) -> Value {
        let graph = &*self.builder.graph;
        let (section, scope) = (graph.nodes[node].section, graph.nodes[node].scope);
        let (name, ty) = (format!("{}.full", graph.values[value].name), graph.ty(value).clone());
        let name = self.builder.unique(&name);
        let graph = &mut *self.builder.graph;
        let (inputs, results) = ([copy], [(name, ty)]);
        let new =
            graph.add_node(NewNode { op, inputs: &inputs, results: &results, section, scope });
        let result = graph.nodes[new].results[0];
        graph.values[result].sharding = Some(sharding);
        graph.order.push(new);
        self.copies[value].push(result);
        result
    }

    fn report(&mut self, value: Value, reader: Value, from: Sharding, to: Sharding, placed: bool) {
        let name = |it: Value| self.builder.graph.values[it].name.clone();
        let report = Move { value: name(value), reader: name(reader), from, to, placed };
        self.builder.graph.moves.push(report);
    }

    /// Appends a `reshard` of `from` that makes `to`, where and when `node` runs.
    fn reshard(&mut self, node: Node, from: Value, to: Value) {
        let graph = &mut *self.builder.graph;
        let (section, scope) = (graph.nodes[node].section, graph.nodes[node].scope);
        let op = Reshard::default().into();
        let new = graph.add_node(NewNode { op, inputs: &[from], results: &[], section, scope });
        graph.nodes[new].results.push(to);
        graph.values[to].def = Def::Result { node: new, index: 0 };
        graph.order.push(new);
    }
}

/// How a moved value is called: after what the move does to it.
fn suffix(from: &Sharding, to: Option<&Sharding>) -> &'static str {
    let Some(to) = to else {
        return if from.partial.is_some() { "partial" } else { "local" };
    };
    let (before, after) = (from.sharded_axes(), to.sharded_axes());
    if to.partial.is_some() && from.partial.is_none() {
        "partial"
    } else if let Some((op, _)) = from.partial {
        op.name()
    } else if after != before && after.is_subset(before) {
        "full"
    } else if after != before && before.is_subset(after) {
        "shard"
    } else {
        "moved"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Undoes a walk over the program that a filetest gives.
    #[track_caller]
    fn check(filetest: &str) {
        let (given, _) = filetest.split_once("; ---").expect("it has a result");
        let mut graph = ir::text::parse_graph(given).unwrap_or_else(|it| panic!("{it}"));
        let text = format!("{graph:?}");
        let before = Before::of(&graph);
        walk(&mut graph, &Prices::default(), PLACED_PENALTY).unwrap();
        assert!(!graph.moves.is_empty(), "nothing is moved");
        before.restore(&mut graph);
        assert_eq!(format!("{graph:?}"), text);
    }

    #[test]
    fn a_walk_can_be_undone() {
        check(include_str!("../../tests/filetests/propagate-shardings/long_sequence.ir"));
        check(include_str!("../../tests/filetests/propagate-shardings/pinned_conflict.ir"));
        check(include_str!("../../tests/filetests/propagate-shardings/row_parallel_sequence.ir"));
    }
}
