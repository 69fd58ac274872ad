//! `batch-collectives`: one call for collectives of one kind over one set of axes that can wait for
//! each other.
//!
//! * Weights of one FSDP unit are gathered in one call, where the first of them is needed.
//! * Gradients of one unit are reduced in one call, when the last of them is there.
//! * What several results of one node need, moves together (the statistics of the loss).
//! * Small reductions that only the update waits for (norm weights over tp, loss and token count; amaxes of
//!   weights, and of what has a history) are made in one call at the end of the section.
//!
//! Nothing is copied for that: a collective has parts, each with buffers of its own.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use cranelift_entity::SecondaryMap;
use ir::graph::{Def, NodeData};
use ir::ops::CollectiveKind;
use ir::{Graph, Node, Op, Phase, Section, Value};

use crate::{Pass, PassError};

/// A gradient reduction is small, and waits for the end of its section, below this many bytes per
/// rank: what a 200 GB/s link moves in the time that a call takes anyway.
const SMALL_BYTES: u64 = 1 << 20;

/// See the [module docs](self).
pub struct BatchCollectives;

impl Pass<Graph> for BatchCollectives {
    fn name(&self) -> &'static str {
        "batch-collectives"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Explicit, Phase::Explicit)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let batches = Batches::find(graph);
        let order = std::mem::take(&mut graph.order);
        let mut walk = Walk {
            graph,
            batches,
            held: SecondaryMap::new(),
            waiting: SecondaryMap::new(),
            n_waiting: 0,
            ready: BinaryHeap::new(),
        };
        let mut section = Section::Prepare;
        for (index, node) in order.into_iter().enumerate() {
            let of = walk.graph.nodes[node].section;
            if of != section {
                walk.close();
                section = of;
            }
            walk.node(index, node);
        }
        walk.close();
        Ok(())
    }
}

/// Why collectives belong together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reason {
    /// Weights of a unit.
    Gather { unit: u32 },
    /// Gradients of a unit.
    Reduce { unit: u32 },
    /// Results of one node.
    Producer(Node),
    /// Small, and needed at the end only.
    End,
}

#[derive(Default)]
struct Batch {
    /// How many nodes belong to it.
    size: usize,
    /// Those that the walk has reached.
    reached: Vec<Node>,
    /// All operands are there from the start, so the call is made for the first member.
    early: bool,
}

struct Batches {
    batches: Vec<Batch>,
    of: SecondaryMap<Node, Option<u32>>,
}

impl Batches {
    fn find(graph: &Graph) -> Batches {
        let gradients = gradients(graph);
        let histories = histories(graph);
        let mut res = Batches { batches: Vec::new(), of: SecondaryMap::new() };
        let mut known: BTreeMap<(CollectiveKind, u16, Section, Reason), u32> = BTreeMap::new();
        for &node in &graph.order {
            let data = &graph.nodes[node];
            let Op::Collective(op) = &data.op else { continue };
            if op.kind.is_local() {
                continue;
            }
            let (input, result) = (data.inputs[0], data.results[0]);
            let unit = graph.scopes[data.scope].unit;
            let weight = is_weight(graph, input);
            let once = matches!(data.section, Section::Prepare | Section::Update);
            let end = gradients[result] || histories[result] || once;
            let reason = if weight && op.kind == CollectiveKind::AllGather {
                Reason::Gather { unit }
            } else if end && local_bytes(graph, input) < SMALL_BYTES && !scatters(op.kind) {
                Reason::End
            } else if gradients[result] {
                Reason::Reduce { unit }
            } else if let Some(producer) = graph.producer(input) {
                Reason::Producer(producer)
            } else {
                continue;
            };
            let index =
                *known.entry((op.kind, op.axes.0, data.section, reason)).or_insert_with(|| {
                    res.batches.push(Batch {
                        early: matches!(reason, Reason::Gather { .. }),
                        ..Batch::default()
                    });
                    (res.batches.len() - 1) as u32
                });
            let batch = &mut res.batches[index as usize];
            batch.size += 1;
            if batch.early {
                batch.reached.push(node);
            }
            res.of[node] = Some(index);
        }
        res
    }
}

/// Whether it is there from the start, or the piece that is kept of what was gathered.
fn is_weight(graph: &Graph, value: Value) -> bool {
    let Some(node) = graph.producer(value) else { return true };
    let data = &graph.nodes[node];
    let slice = matches!(&data.op, Op::Collective(it) if it.kind == CollectiveKind::Slice);
    let gathered = |it: Value| {
        let node = graph.producer(it).map(|it| &graph.nodes[it]);
        node.is_some_and(|it| {
            matches!(&it.op, Op::Collective(op) if op.kind == CollectiveKind::AllGather)
                && it.inputs.iter().all(|&it| is_weight(graph, it))
        })
    };
    slice && data.inputs.iter().all(|&it| gathered(it))
}

/// Amaxes that a history takes in.
fn histories(graph: &Graph) -> SecondaryMap<Value, bool> {
    let mut res = SecondaryMap::new();
    for &node in &graph.order {
        let data = &graph.nodes[node];
        if let Some(amax) = data.op.history() {
            res[data.inputs[amax]] = true;
        }
    }
    res
}

fn scatters(kind: CollectiveKind) -> bool {
    matches!(kind, CollectiveKind::ReduceScatter(_))
}

fn local_bytes(graph: &Graph, value: Value) -> u64 {
    let ty = graph.ty(value);
    graph.sharding(value).local_elements(&ty.shape, &graph.mesh) * ty.dtype.bytes()
}

/// Values on the way from the backward pass to a parameter's gradient: collectives, casts and
/// accumulation, which nothing else reads; and the collectives in `Update` that reduce sums over micro-batches.
fn gradients(graph: &Graph) -> SecondaryMap<Value, bool> {
    let mut res: SecondaryMap<Value, bool> = SecondaryMap::new();
    for param in &graph.params {
        if let Some(grad) = param.grad {
            res[grad] = true;
        }
    }
    for store in graph.stores.iter().filter(|it| it.section == Section::Backward) {
        res[store.value] = true;
    }
    for &node in graph.order.iter().rev() {
        let data = &graph.nodes[node];
        let is_collective = |it: &NodeData| matches!(it.op, Op::Collective(_));
        let from_sums = data.section == Section::Update && is_collective(data);
        let passes_on = (data.op.is_sum() || is_collective(data))
            && (data.section == Section::Backward || from_sums);
        if passes_on && data.results.iter().all(|&it| res[it]) {
            for &input in &data.inputs {
                // The sum of several uses is not a gradient's last step, so it is not delayed.
                let is_last =
                    |it: &NodeData| is_collective(it) || it.op.is_sum() && it.inputs.len() == 1;
                res[input] |= graph.producer(input).is_some_and(|it| is_last(&graph.nodes[it]));
            }
        }
    }
    res
}

struct Walk<'a> {
    graph: &'a mut Graph,
    batches: Batches,
    /// Values that are not there yet because a batch waits for its last member.
    held: SecondaryMap<Value, bool>,
    /// Nodes that wait for such a value, each with its place in the program. A node that waits for several is
    /// listed with one of them at a time.
    waiting: SecondaryMap<Value, Vec<(usize, Node)>>,
    /// The number of waiting nodes.
    n_waiting: usize,
    /// The waiting nodes whose value is there, the first in the program first.
    ready: BinaryHeap<Reverse<(usize, Node)>>,
}

impl Walk<'_> {
    /// Runs the node at this place in the program, or lets it wait.
    fn node(&mut self, place: usize, node: Node) {
        let held = self.graph.nodes[node].inputs.iter().find(|&&it| self.held[it]).copied();
        if let Some(value) = held {
            self.hold(node);
            self.waiting[value].push((place, node));
            self.n_waiting += 1;
            return;
        }
        let Some(index) = self.batches.of[node] else {
            self.graph.order.push(node);
            return self.release(node);
        };
        let batch = &mut self.batches.batches[index as usize];
        if batch.early {
            let members = std::mem::take(&mut batch.reached);
            self.merge(&members);
            return self.release(node);
        }
        batch.reached.push(node);
        if batch.reached.len() == batch.size {
            self.finish(index);
        } else {
            self.hold(node);
        }
    }

    fn hold(&mut self, node: Node) {
        for &result in &self.graph.nodes[node].results {
            self.held[result] = true;
        }
    }

    /// The results of a node are there, and what waits for them can go on.
    fn release(&mut self, node: Node) {
        for &result in &self.graph.nodes[node].results {
            if std::mem::replace(&mut self.held[result], false) {
                self.ready
                    .extend(std::mem::take(&mut self.waiting[result]).into_iter().map(Reverse));
            }
        }
    }

    /// Makes the call for what a batch has, and runs what waited for it.
    fn finish(&mut self, index: u32) {
        let members = std::mem::take(&mut self.batches.batches[index as usize].reached);
        self.batches.batches[index as usize].size -= members.len();
        self.merge(&members);
        members.iter().for_each(|&it| self.release(it));
        while let Some(Reverse((place, node))) = self.ready.pop() {
            self.n_waiting -= 1;
            self.node(place, node);
        }
    }

    /// End of a section. A batch of which one member depends on another is made in parts.
    fn close(&mut self) {
        while let Some(index) =
            self.batches.batches.iter().position(|it| !it.early && !it.reached.is_empty())
        {
            self.finish(index as u32);
        }
        assert_eq!(self.n_waiting, 0, "what waits, waits for a batch");
    }

    /// Appends one node with the parts of all `members`.
    fn merge(&mut self, members: &[Node]) {
        let Some((&first, rest)) = members.split_first() else { return };
        for &member in rest {
            let data = self.graph.nodes[member].clone();
            self.graph.nodes[first].inputs.extend(data.inputs);
            for result in data.results {
                let index = self.graph.nodes[first].results.len() as u32;
                self.graph.values[result].def = Def::Result { node: first, index };
                self.graph.nodes[first].results.push(result);
            }
        }
        self.graph.order.push(first);
    }
}
