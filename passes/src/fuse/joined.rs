//! Nodes that become one: a body of what both do, if a kernel runs it.

use ir::ops::{Body, Fused, Source};
use ir::{Graph, Node, Op, TensorType, Value};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use super::Walk;

/// Several nodes as one: their body, its operands and results.
pub(super) struct Joined {
    pub body: Body,
    pub inputs: SmallVec<[Value; 4]>,
    /// Results of all of them.
    pub results: SmallVec<[Value; 4]>,
}

impl Joined {
    /// One node.
    pub fn of(graph: &Graph, node: Node) -> Option<Joined> {
        let data = &graph.nodes[node];
        let dtypes = data.inputs.iter().map(|&it| graph.ty(it).dtype);
        let body = Body::of(&data.op, dtypes, data.results.len())?;
        let (inputs, results) = (data.inputs.iter().copied(), data.results.iter().copied());
        Some(Joined { body, inputs: inputs.collect(), results: results.collect() })
    }

    /// These and then another, which reads operands and results of theirs, or more.
    pub fn then(mut self, graph: &Graph, node: Node) -> Option<Joined> {
        let data = &graph.nodes[node];
        let find = |list: &[Value], value: Value| list.iter().position(|&it| it == value);
        let mut sources = SmallVec::<[Source; 4]>::new();
        for &input in &data.inputs {
            let known = find(&self.results, input).map(Source::Result);
            let known = known.or_else(|| find(&self.inputs, input).map(Source::Operand));
            sources.push(known.unwrap_or_else(|| {
                self.inputs.push(input);
                Source::New(graph.ty(input).dtype)
            }));
        }
        let body = self.body.then(&data.op, &sources, data.results.len())?;
        self.results.extend(data.results.iter().copied());
        Some(Joined { body, ..self })
    }

    /// The same, where `value` is computed in f32 and not rounded for those of them that read it.
    pub fn widened(self, graph: &Graph, value: Value) -> Option<Joined> {
        let at = self.results.iter().position(|&it| it == value)?;
        let types: Vec<&TensorType> = self.inputs.iter().map(|&it| graph.ty(it)).collect();
        let body = self.body.widened(at, &types).ok()??;
        Some(Joined { body, ..self })
    }

    /// The same with other results.
    pub fn returning(self, results: SmallVec<[Value; 4]>) -> Option<Joined> {
        let at = |it: &Value| self.results.iter().position(|known| known == it);
        let at: Option<Vec<usize>> = results.iter().map(at).collect();
        Some(Joined { body: self.body.returning(&at?)?, results, ..self })
    }

    /// The op that does it, if a kernel runs that. Equal bodies are one.
    pub fn op(&self, bodies: &mut FxHashSet<Body>) -> Option<Op> {
        if let Some(body) = bodies.get(&self.body) {
            return Some(Fused { body: body.clone() }.into());
        }
        if let Some(op) = self.body.alone() {
            return Some(op.clone());
        }
        let op = Fused { body: self.body.clone() }.into();
        if !kernels::cuda::runs(&op) {
            return None;
        }
        bodies.insert(self.body.clone());
        Some(op)
    }
}

impl Walk<'_> {
    /// Lets `node` do what was joined. False, and nothing is done, if no kernel runs that.
    pub(super) fn become_joined(&mut self, node: Node, joined: Joined) -> bool {
        let Some(op) = joined.op(&mut self.bodies) else { return false };
        self.graph.set_op(node, op, &joined.inputs, &joined.results);
        true
    }
}
