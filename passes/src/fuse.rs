//! `fuse`: lets an op do on the way what would be a pass over memory of its own.
//!
//! ```text
//! cast f32 (matmul)                   matmul out f32; so for other ops that sum in f32 anyway
//! add x, (matmul)                     matmul onto x, one after the other where there are several
//! bias_add (matmul), b                matmul with a bias; so quant_matmul
//! activation matmul                   matmul with a gelu, which gives the sum as well
//! add x, (norm_grad).dx               norm_grad with a residual
//! add (pad_dim x), (pad_dim y)        concat x, y, where they fill the dimension
//! ce_stats_grad (ce_loss_grad), ..    cross_entropy, with the loss and all before it
//! sum_leading x, quantize x, s        both as one
//! transpose quantize                  quantize that gives both copies
//! quantize (norm x), (delayed_scale)  norm that gives codes; activations, glus and their gradients with quantize
//! embedding ids, (all_gather w)       embedding of the rows held, and a sum
//! norm (add x, y)                     norm with a residual, which gives the sum as well
//! cast (adamw).p                      adamw that gives p in both types
//! slice (embedding_grad)              embedding_grad of the rows held
//! backward: glu gate, up              glu_grad and glu as one
//! amax (glu gate, up)                 both as one; so activations; norms, their gradients and adamw give it
//! ```
//!
//! What is in brackets must have no other reader, but for the last six rules. Sums are rounded once
//! instead of twice. A value keeps its name and has another maker.
//!
//! One walk in program order, with the numbers of readers at hand: each rule looks at a node and at
//! the makers of its operands. A maker that is earlier than what it is to add moves to its reader. The
//! last rule but one moves readers behind a maker, and comes before the walk. The last comes behind it,
//! when makers have all other results.

mod activation;
mod add;
mod amax;
mod bias_grad;
mod codes;
mod cross_entropy;
mod embedding;
mod glu;
mod joined;
mod pads;
mod widen;

use cranelift_entity::SecondaryMap;
use ir::graph::Def;
use ir::ops::{AdamW, Body, CollectiveKind, Copies, Quantize};
use ir::{DType, Graph, Node, Op, Phase, TensorType, Value};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use crate::{Pass, PassError};
use joined::Joined;

/// See the [module docs](self).
pub struct Fuse;

impl Pass<Graph> for Fuse {
    fn name(&self) -> &'static str {
        "fuse"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Explicit, Phase::Explicit)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let order = std::mem::take(&mut graph.order);
        let mut bodies = FxHashSet::default();
        let order = glu::with_gradients(graph, order, &mut bodies);
        let mut walk = Walk::new(graph, &order, bodies);
        order.iter().for_each(|&it| walk.node(it));
        order.iter().for_each(|&it| walk.amax(it));
        let Walk { places, .. } = walk;
        let mut kept: Vec<(Place, Node)> =
            graph.nodes.keys().filter_map(|it| Some((places[it]?, it))).collect();
        kept.sort();
        graph.order = kept.into_iter().map(|it| it.1).collect();
        Ok(())
    }
}

/// Where a node runs: at the place in the given order, or behind what was there.
type Place = (u32, u32);

struct Walk<'a> {
    graph: &'a mut Graph,
    /// `None` for nodes that are gone.
    places: SecondaryMap<Node, Option<Place>>,
    /// How often a value is read; stores, results and parameters read too.
    n_reads: SecondaryMap<Value, u32>,
    /// The nodes that read a value in the given order.
    readers: SecondaryMap<Value, SmallVec<[Node; 2]>>,
    /// Bodies that are made already.
    bodies: FxHashSet<Body>,
}

impl<'a> Walk<'a> {
    fn new(graph: &'a mut Graph, order: &[Node], bodies: FxHashSet<Body>) -> Walk<'a> {
        let mut res = Walk {
            places: SecondaryMap::new(),
            n_reads: SecondaryMap::new(),
            readers: SecondaryMap::new(),
            bodies,
            graph,
        };
        for (at, &node) in (0..).zip(order) {
            // 0 is the place of what is there from the start.
            res.places[node] = Some((at + 1, 0));
            for &input in &res.graph.nodes[node].inputs {
                res.n_reads[input] += 1;
                res.readers[input].push(node);
            }
        }
        let params =
            res.graph.params.iter().flat_map(|it| [Some(it.full), Some(it.compute), it.grad]);
        for value in res.graph.roots().chain(params.flatten()) {
            res.n_reads[value] += 1;
        }
        res
    }

    fn node(&mut self, node: Node) {
        match self.graph.nodes[node].op {
            Op::Cast(ref it) => match it.to {
                DType::F32 => self.widen(node),
                DType::Bf16 | DType::I32 | DType::E4M3 | DType::E5M2 => self.compute_weight(node),
            },
            Op::Activation(_) => self.activation(node),
            Op::Add(_) => self.add(node),
            Op::BiasAdd(_) => self.bias(node),
            Op::Embedding(_) => self.embedding(node),
            Op::CeStatsGrad(_) => self.cross_entropy(node),
            Op::RmsNorm(_) | Op::LayerNorm(_) => self.residual(node),
            Op::Quantize(_) => {
                self.bias_grad(node);
                self.codes(node);
            }
            Op::Transpose(_) => self.columns(node),
            Op::Collective(ref it) if it.kind == CollectiveKind::Slice => self.slice(node),
            _ => (),
        }
    }

    /// The node that makes `value` for `reader` alone, in the same section, and which result it is.
    fn sole(&self, value: Value, reader: Node) -> Option<(Node, usize)> {
        let (node, index) = self.maker(value, reader)?;
        (self.n_reads[value] == 1).then_some((node, index))
    }

    /// The node that makes `value` in the section of `reader`, and which result it is.
    fn maker(&self, value: Value, reader: Node) -> Option<(Node, usize)> {
        let Def::Result { node, index } = self.graph.values[value].def else { return None };
        let same = self.graph.nodes[node].section == self.graph.nodes[reader].section;
        same.then_some((node, index as usize))
    }

    /// Lets `maker` make `value` as result `index`, in place of what was there.
    fn hand_over(&mut self, value: Value, maker: Node, index: usize) {
        self.graph.values[value].def = Def::Result { node: maker, index: index as u32 };
        let results = &mut self.graph.nodes[maker].results;
        match results.get_mut(index) {
            Some(slot) => *slot = value,
            None => results.push(value),
        }
    }

    /// Lets `maker` make `value` as one more result in front of what has been result `index`.
    fn insert(&mut self, value: Value, maker: Node, index: usize) {
        let results = &mut self.graph.nodes[maker].results;
        results.insert(index, value);
        for (i, &it) in results.iter().enumerate().skip(index) {
            self.graph.values[it].def = Def::Result { node: maker, index: i as u32 };
        }
    }

    fn remove(&mut self, node: Node) {
        self.places[node] = None;
    }

    fn place(&self, node: Node) -> Place {
        self.places[node].expect("what makes an operand is there")
    }

    /// The place after which `value` is there.
    fn since(&self, value: Value) -> Place {
        self.graph.producer(value).map_or((0, 0), |it| self.place(it))
    }

    fn bias(&mut self, node: Node) {
        let [x, bias] = self.graph.nodes[node].inputs[..] else { return };
        let Some((maker, 0)) = self.sole(x, node) else { return };
        if self.graph.ty(bias).dtype != self.graph.ty(x).dtype {
            return;
        }
        match &mut self.graph.nodes[maker].op {
            Op::Matmul(it) if !it.bias && !it.gelu => it.bias = true,
            Op::QuantMatmul(it) if !it.bias => it.bias = true,
            _ => return,
        }
        self.graph.nodes[maker].inputs.push(bias);
        if self.since(bias) > self.place(maker) {
            self.places[maker] = self.places[node];
        }
        self.hand_over(self.graph.nodes[node].results[0], maker, 0);
        self.remove(node);
    }

    /// A norm reads a sum that it may make itself, as nothing reads it before.
    fn residual(&mut self, node: Node) {
        let sum = self.graph.nodes[node].inputs[0];
        let Some((maker, 0)) = self.maker(sum, node) else { return };
        let (Op::Add(_), [x, r]) =
            (&self.graph.nodes[maker].op, &self.graph.nodes[maker].inputs[..])
        else {
            return;
        };
        let (x, r) = (*x, *r);
        let same = self.graph.ty(x) == self.graph.ty(sum) && self.graph.ty(r) == self.graph.ty(sum);
        if !same || self.readers[sum].first() != Some(&node) {
            return;
        }
        match &mut self.graph.nodes[node].op {
            Op::RmsNorm(it) if !it.residual => it.residual = true,
            Op::LayerNorm(it) if !it.residual => it.residual = true,
            _ => return,
        }
        let data = &mut self.graph.nodes[node];
        data.inputs[0] = x;
        data.inputs.push(r);
        let index = data.results.len();
        self.n_reads[sum] -= 1;
        self.hand_over(sum, node, index);
        self.remove(maker);
    }

    /// Codes with columns first, which what makes the rows can make as well.
    fn columns(&mut self, node: Node) {
        let data = &self.graph.nodes[node];
        let (codes, result) = (data.inputs[0], data.results[0]);
        let Op::Transpose(op) = &data.op else { return };
        let last = op.perm.len() - 1;
        if !op.perm.iter().copied().eq(std::iter::once(last).chain(0..last)) {
            return;
        }
        let Some((maker, 0)) = self.maker(codes, node) else { return };
        let Some(mut joined) = Joined::of(self.graph, maker) else { return };
        let Some((step, 0)) = joined.body.maker(joined.body.results()[0]) else { return };
        let Op::Quantize(quantize @ Quantize { copies: Copies::Rows, .. }) = &step.op else {
            return;
        };
        // Where rows are not kept for the backward pass, it quantizes again for columns.
        let rows = self.n_reads[codes] > 1;
        let copies = if rows { Copies::Both } else { Copies::Columns };
        let quantize = Quantize { copies, ..quantize.clone() }.into();
        let Some(body) = joined.body.with_maker(0, quantize, if rows { 2 } else { 1 }) else {
            return;
        };
        joined.body = body;
        match rows {
            true => joined.results.insert(1, result),
            false => joined.results[0] = result,
        }
        if self.become_joined(maker, joined) {
            self.n_reads[codes] -= 1;
            self.remove(node);
        }
    }

    /// The new weight in the type in which it computes.
    fn compute_weight(&mut self, node: Node) {
        let data = &self.graph.nodes[node];
        let (next, result) = (data.inputs[0], data.results[0]);
        let to = self.graph.ty(result).dtype;
        let Some((maker, 0)) = self.maker(next, node) else { return };
        let compute = match &mut self.graph.nodes[maker].op {
            Op::AdamW(it) => &mut it.compute,
            Op::Adam(it) => &mut it.compute,
            _ => return,
        };
        if compute.is_some() {
            return;
        }
        *compute = Some(to);
        self.n_reads[next] -= 1;
        self.hand_over(result, maker, AdamW::STATES);
        self.remove(node);
    }

    /// Rows of a table's gradient that another rank holds are not made.
    fn slice(&mut self, node: Node) {
        let data = &self.graph.nodes[node];
        let [(input, result)] =
            data.inputs.iter().zip(&data.results).collect::<SmallVec<[_; 1]>>()[..]
        else {
            return;
        };
        let (input, result) = (*input, *result);
        let Some((maker, 0)) = self.sole(input, node) else { return };
        if !matches!(self.graph.nodes[maker].op, Op::EmbeddingGrad(_)) || !self.makes(maker, result)
        {
            return;
        }
        self.hand_over(result, maker, 0);
        self.remove(node);
    }

    /// Whether `maker`, with the operands that it has, can make its one result laid out as `value` is.
    fn makes(&self, maker: Node, value: Value) -> bool {
        let (graph, data) = (&*self.graph, &self.graph.nodes[maker]);
        let types: SmallVec<[&TensorType; 4]> =
            data.inputs.iter().map(|&it| graph.ty(it)).collect();
        let factors = data.op.factors(&types, &[graph.ty(value)]);
        let shardings: SmallVec<[_; 4]> =
            data.inputs.iter().map(|&it| graph.sharding(it)).collect();
        let Ok(mut assignment) = factors.assign(&shardings, &graph.mesh) else { return false };
        let wanted = graph.sharding(value);
        factors.adopt(&mut assignment, &factors.results[0], wanted, &graph.mesh);
        let inputs = shardings.iter().enumerate();
        let mut same =
            inputs.map(|(i, it)| factors.input(i, &assignment, &graph.mesh).as_ref() == Some(*it));
        same.all(|it| it) && factors.result(0, &assignment, &graph.mesh).as_ref() == Some(wanted)
    }
}
