//! Decides which activations a checkpointing policy recomputes, from the model's names of ops.
//!
//! A recipe has replaced some of the ops that the model names, and fusion will replace more. [`StandsFor`] says what
//! the model calls them, so under `Selective(["matmul", "rms_norm"])` and FP8:
//!
//! ```text
//! %y, %rstd = rms_norm %x, %w            listed, but nothing reads %y in the backward pass
//! %a = amax %y                           kept, as are all scales: they are few numbers, and ranks agree on them
//! %s, %i = quant_scale %a
//! %c = quantize %y, %s                   kept in place of %y
//! %h = quant_matmul %c, %w.full, ..      kept: it is a matmul
//! ```

use cranelift_entity::SecondaryMap;
use ir::graph::Checkpoint;
use ir::ops::{OpKind, StandsFor};
use ir::{Graph, Node, Op, Section, TensorType, Value};
use smallvec::SmallVec;

/// See the [module docs](self).
pub(super) struct Policy<'a> {
    graph: &'a Graph,
    /// Nodes whose results their policy lists, as far as [`Policy::recomputes`] was asked.
    listed: SecondaryMap<Node, bool>,
    /// Values that the backward pass reads itself.
    read_back: SecondaryMap<Value, bool>,
}

impl<'a> Policy<'a> {
    pub(super) fn new(graph: &'a Graph) -> Policy<'a> {
        let mut read_back = SecondaryMap::new();
        let nodes = graph.order.iter().map(|&it| &graph.nodes[it]);
        for node in nodes.filter(|it| it.section == Section::Backward) {
            node.inputs.iter().for_each(|&it| read_back[it] = true);
        }
        Policy { graph, listed: SecondaryMap::new(), read_back }
    }

    /// Returns true if the policy recomputes the results of `node`, a node of the forward pass that gathers no weight.
    /// Must be called in program order.
    pub(super) fn recomputes(&mut self, node: Node) -> bool {
        let scope = self.graph.nodes[node].scope;
        match &self.graph.scopes[scope].checkpoint {
            Checkpoint::None => false,
            Checkpoint::Full => true,
            Checkpoint::Selective(kept) => {
                self.listed[node] = match self.stands_for(node, kept) {
                    Listed::Yes | Listed::Scale => true,
                    Listed::No => false,
                    // Where the backward pass needs the value itself, it makes this form of it again.
                    Listed::Like(value) => self.is_listed(value) && !self.read_back[value],
                };
                !self.listed[node]
            }
            Checkpoint::Recompute(ops) => {
                self.listed[node] = match self.stands_for(node, ops) {
                    Listed::Yes => true,
                    Listed::No | Listed::Scale => false,
                    Listed::Like(value) => self.is_listed(value),
                };
                self.listed[node]
            }
        }
    }

    fn is_listed(&self, value: Value) -> bool {
        self.graph.producer(value).is_some_and(|it| self.listed[it])
    }

    fn stands_for(&self, node: Node, ops: &[String]) -> Listed {
        let data = &self.graph.nodes[node];
        let lists =
            |name: &str| if ops.iter().any(|it| it == name) { Listed::Yes } else { Listed::No };
        let types: SmallVec<[&TensorType; 4]> =
            data.inputs.iter().map(|&it| self.graph.ty(it)).collect();
        let own = match &data.op {
            Op::Collective(it) => it.kind.name(),
            other => OpKind::name(other.kind()),
        };
        match (lists(own), data.op.stands_for(&types)) {
            (Listed::Yes, _) => Listed::Yes,
            (_, StandsFor::Itself) => Listed::No,
            (_, StandsFor::Op(kind)) => lists(kind.name()),
            (_, StandsFor::Operand) => Listed::Like(data.inputs[0]),
            (_, StandsFor::Scale) => Listed::Scale,
        }
    }
}

/// The answer of a policy about an op.
enum Listed {
    Yes,
    No,
    /// Listed if the policy lists the op that makes this value.
    Like(Value),
    /// The op makes a scale, or a number that a scale is made of.
    Scale,
}
