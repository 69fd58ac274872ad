//! `rematerialize`: computes again in the backward pass what is too large to keep until then.
//!
//! Two policies, one mechanism. Gathered weights of a unit that drops them are gathered
//! again, but for those of the last unit, with which the backward pass starts. Activations of a
//! checkpointed layer are computed again from what entered it, or from what is kept of it, by clones of
//! the very nodes that made them, collectives and their axes included. A clone is placed in front of
//! the first backward node that needs it.
//!
//! ```text
//! forward:   %w.full = all_gather(dp) %w          forward:   %w.full = all_gather(dp) %w
//! backward:  %dx = matmul %dy, %w.full            backward:  %w.full.again = all_gather(dp) %w
//!                                                            %dx = matmul %dy, %w.full.again
//! ```
//!
//! A unit that reshards to a group keeps a piece of what it gathered, and gathers those of its neighbours:
//!
//! ```text
//! forward:   %w.full = all_gather(dp_out, dp_in) %w : [_, _]
//!            %w.full.kept = slice(dp_in) %w.full : [dp_in, _]
//! backward:  %w.full.again = all_gather(dp_in) %w.full.kept : [_, _]
//! ```

mod policy;

use cranelift_entity::SecondaryMap;
use ir::graph::{AfterForward, Def, Name, NewNode};
use ir::ops::{Collective, CollectiveKind};
use ir::placement::{AxisSet, Digit, DimLayout, Sharding};
use ir::{Builder, Graph, Node, Op, Phase, Section, TensorType, Value};
use smallvec::SmallVec;

use crate::{Pass, PassError};
use policy::Policy;

/// See the [module docs](self).
pub struct Rematerialize;

impl Pass<Graph> for Rematerialize {
    fn name(&self) -> &'static str {
        "rematerialize"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Explicit, Phase::Explicit)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let again = again(graph);
        let order = std::mem::take(&mut graph.order);
        let mut clones = Clones {
            builder: Builder::new(graph),
            again,
            kept: SecondaryMap::new(),
            of: SecondaryMap::new(),
        };
        for node in order {
            if clones.builder.graph.nodes[node].section == Section::Backward {
                for i in 0..clones.builder.graph.nodes[node].inputs.len() {
                    let input = clones.builder.graph.nodes[node].inputs[i];
                    clones.builder.graph.nodes[node].inputs[i] = clones.value(input);
                }
            }
            clones.builder.graph.order.push(node);
            if clones.again[node] {
                clones.keep(node);
            }
        }
        Ok(())
    }
}

/// Forward nodes whose results are not kept for the backward pass. What another layer or unit reads is kept, and
/// so are the weights of the unit whose backward pass comes first.
fn again(graph: &Graph) -> SecondaryMap<Node, bool> {
    let mut res = SecondaryMap::new();
    let mut gathers: Vec<Node> = Vec::new();
    let mut policy = Policy::new(graph);
    let mut gathered: SecondaryMap<Value, bool> = SecondaryMap::new();
    for &node in &graph.order {
        let data = &graph.nodes[node];
        if data.section != Section::Forward {
            continue;
        }
        let scope = &graph.scopes[data.scope];
        let is_weight = |value: Value| match graph.values[value].def {
            Def::Param | Def::State => true,
            Def::Input | Def::Sum => false,
            Def::Result { .. } => gathered[value],
        };
        let gather =
            matches!(data.op, Op::Collective(_)) && data.inputs.iter().all(|&it| is_weight(it));
        res[node] = if gather {
            data.results.iter().for_each(|&it| gathered[it] = true);
            gathers.push(node);
            scope.after_forward != AfterForward::Keep
        } else {
            policy.recomputes(node)
        };
    }
    let last = gathers.iter().rfind(|&&it| res[it]).map(|&it| unit(graph, it));
    for &gather in gathers.iter().filter(|&&it| Some(unit(graph, it)) == last) {
        res[gather] = false;
    }
    for &node in &graph.order {
        let data = &graph.nodes[node];
        if data.section == Section::Forward {
            for producer in data.inputs.iter().filter_map(|&it| graph.producer(it)) {
                if layer(graph, producer) != layer(graph, node) {
                    res[producer] = false;
                }
            }
        }
    }
    res
}

fn unit(graph: &Graph, node: Node) -> u32 {
    graph.scopes[graph.nodes[node].scope].unit
}

/// The unit and the layer of a node: activations are recomputed from the inputs of these.
fn layer(graph: &Graph, node: Node) -> (u32, Option<u32>) {
    let scope = &graph.scopes[graph.nodes[node].scope];
    (scope.unit, scope.layer)
}

/// `full`, cut over the axes of `group` in the dimension that they cut in `stored`.
fn within(stored: &Sharding, full: &Sharding, group: AxisSet) -> Option<Sharding> {
    let dim = stored.dims.iter().position(|it| group.is_subset(it.axis_set()))?;
    let minor = stored.dims[dim].axes().filter(|&it| group.contains(it)).map(Digit::Axis);
    let digits = full.dims[dim].digits().iter().copied().chain(minor);
    Some(full.with_dim(dim, DimLayout::new(digits)))
}

struct Clones<'a> {
    builder: Builder<'a>,
    again: SecondaryMap<Node, bool>,
    /// The piece that is kept of what is gathered again from a group.
    kept: SecondaryMap<Value, Option<Value>>,
    /// The clone of each value, once made.
    of: SecondaryMap<Value, Option<Value>>,
}

impl Clones<'_> {
    /// What the backward pass reads for `value`. Producers are cloned first; a chain of producers is
    /// as deep as a layer is long, so it is walked with a stack of its own.
    fn value(&mut self, value: Value) -> Value {
        let mut stack: SmallVec<[Value; 16]> = SmallVec::from_slice(&[value]);
        while let Some(&top) = stack.last() {
            let Some(node) = self.cloned(top) else {
                stack.pop();
                continue;
            };
            let open: SmallVec<[Value; 4]> = {
                let data = &self.builder.graph.nodes[node];
                let from_kept = data.results.iter().any(|&it| self.kept[it].is_some());
                let inputs = if from_kept { &[] } else { &data.inputs[..] };
                inputs.iter().copied().filter(|&it| self.cloned(it).is_some()).collect()
            };
            if open.is_empty() {
                self.clone_node(node);
                stack.pop();
            } else {
                stack.extend(open);
            }
        }
        self.of[value].unwrap_or(value)
    }

    /// The producer of `value`, if it still has to be cloned.
    fn cloned(&self, value: Value) -> Option<Node> {
        let node = self.builder.graph.producer(value)?;
        (self.again[node] && self.of[value].is_none()).then_some(node)
    }

    /// Cuts a piece of what `node` gathers for this rank to keep, if its unit reshards to a group that the
    /// gather spans.
    fn keep(&mut self, node: Node) {
        let Builder { graph, .. } = &mut self.builder;
        let data = graph.nodes[node].clone();
        let (Op::Collective(op), AfterForward::KeepPiece(group)) =
            (&data.op, graph.scopes[data.scope].after_forward)
        else {
            return;
        };
        let (&[input], &[full]) = (&data.inputs[..], &data.results[..]) else { return };
        if op.kind != CollectiveKind::AllGather || !group.is_subset(op.axes) {
            return;
        }
        let Some(sharding) = within(graph.sharding(input), graph.sharding(full), group) else {
            return;
        };
        let kept = format!("{}.kept", graph.values[full].name);
        let kept = (self.builder.unique(&kept), self.builder.graph.ty(full).clone());
        let slice = Collective { kind: CollectiveKind::Slice, axes: group };
        let new = NewNode {
            op: slice.into(),
            inputs: &[full],
            results: &[kept],
            section: data.section,
            scope: data.scope,
        };
        let new = self.builder.graph.add_node(new);
        let kept = self.builder.graph.nodes[new].results[0];
        self.builder.graph.values[kept].sharding = Some(sharding);
        self.builder.graph.order.push(new);
        self.kept[full] = Some(kept);
    }

    fn clone_node(&mut self, node: Node) {
        let mut data = self.builder.graph.nodes[node].clone();
        let mut inputs: SmallVec<[Value; 4]> =
            data.inputs.iter().map(|&it| self.of[it].unwrap_or(it)).collect();
        let group = self.builder.graph.scopes[data.scope].after_forward;
        if let (Some(kept), AfterForward::KeepPiece(axes)) = (self.kept[data.results[0]], group) {
            data.op = Collective { kind: CollectiveKind::AllGather, axes }.into();
            inputs = SmallVec::from_slice(&[kept]);
        }
        let mut results: SmallVec<[(Name, TensorType); 2]> = SmallVec::new();
        for &result in &data.results {
            let name = format!("{}.again", self.builder.graph.values[result].name);
            results.push((self.builder.unique(&name), self.builder.graph.ty(result).clone()));
        }
        let (section, scope) = (Section::Backward, data.scope);
        let new = NewNode { op: data.op, inputs: &inputs, results: &results, section, scope };
        let new = self.builder.graph.add_node(new);
        for (i, &old) in data.results.iter().enumerate() {
            let clone = self.builder.graph.nodes[new].results[i];
            self.builder.graph.values[clone].sharding =
                self.builder.graph.values[old].sharding.clone();
            self.of[old] = Some(clone);
        }
        self.builder.graph.order.push(new);
    }
}
