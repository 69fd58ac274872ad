//! A lookup in a gathered table: ranks look up in the rows they hold, and what they find moves.
//!
//! ```text
//! %w.full = all_gather(dp) %w               %ids.full = all_gather(dp) %ids
//! %y = embedding %ids, %w.full              %y.partial = embedding %ids.full, %w
//!                                           %y = reduce_scatter(sum, dp) %y.partial
//! ```
//!
//! A rank gives zeros for the rows of others, so the sum is exact in any type. It is made where that
//! takes less time than the gather, and no more memory than the gathered table. The ids are gathered
//! once: a copy that is there, as the gradient's often is, serves or moves to the front.

use ir::graph::NewNode;
use ir::ops::{Collective, CollectiveKind};
use ir::placement::{self, AxisSet, CommCost, ReduceOp, Sharding, Step, StepKind};
use ir::{Builder, Node, Op, TensorType, Value};

use super::Walk;

/// How a lookup is made where the rows are.
struct Lookup {
    /// Gathers the table, for this lookup only.
    gather: Node,
    table: Value,
    axes: AxisSet,
    /// The ids on all ranks that hold rows.
    ids: Sharding,
    /// Gathers the ids already, here or later.
    copy: Option<Node>,
    partial: Sharding,
}

impl Walk<'_> {
    pub(super) fn embedding(&mut self, node: Node) {
        let Some(lookup) = self.lookup(node) else { return };
        let (at, _) = self.place(node);
        let [ids, full] = self.graph.nodes[node].inputs[..] else { return };
        let result = self.graph.nodes[node].results[0];

        let copy = match lookup.copy {
            Some(copy) => {
                self.n_reads[ids] -= 1;
                copy
            }
            None => {
                let name = format!("{}.full", self.graph.values[ids].name);
                let copy = self.collective(node, CollectiveKind::AllGather, lookup.axes, ids);
                let whole = self.leaf(&name, ids, lookup.ids);
                self.hand_over(whole, copy, 0);
                copy
            }
        };
        if self.places[copy].is_none_or(|it| it > (at, 0)) {
            self.graph.nodes[copy].section = self.graph.nodes[node].section;
            self.places[copy] = Some((at, 0));
        }
        let whole = self.graph.nodes[copy].results[0];
        self.n_reads[whole] += 1;

        let name = self.graph.values[result].name.clone();
        let name = format!("{}.partial", name.strip_suffix(".partial").unwrap_or(&name));
        let partial = self.leaf(&name, result, lookup.partial);
        let kind = CollectiveKind::ReduceScatter(ReduceOp::Sum);
        let sum = self.collective(node, kind, lookup.axes, partial);
        self.n_reads[partial] = 1;
        self.hand_over(result, sum, 0);
        self.hand_over(partial, node, 0);
        self.graph.nodes[node].inputs = [whole, lookup.table].into_iter().collect();
        self.places[node] = Some((at, 1));
        self.places[sum] = Some((at, 2));

        self.remove(lookup.gather);
        for param in self.graph.params.iter_mut().filter(|it| it.full == full) {
            param.full = lookup.table;
            self.n_reads[lookup.table] += 1;
        }
    }

    /// How to make the lookup where the rows are, if that is better.
    fn lookup(&self, node: Node) -> Option<Lookup> {
        let (graph, data) = (&*self.graph, &self.graph.nodes[node]);
        let (&[ids, full], result) = (&data.inputs[..], data.results[0]) else { return None };
        let (gather, _) = self.maker(full, node)?;
        let (Op::Collective(op), &[table]) =
            (&graph.nodes[gather].op, &graph.nodes[gather].inputs[..])
        else {
            return None;
        };
        // A parameter names what its modules read, which is no reader.
        let named = graph.params.iter().filter(|it| it.full == full).count();
        if op.kind != CollectiveKind::AllGather || self.n_reads[full] as usize != named + 1 {
            return None;
        }

        let axes = op.axes;
        let whole = graph.sharding(ids).without(axes);
        let types = [graph.ty(ids), graph.ty(table)];
        let factors = data.op.factors(&types, &[graph.ty(result)]);
        let assignment = factors.assign(&[&whole, graph.sharding(table)], &graph.mesh).ok()?;
        let partial = factors.result(0, &assignment, &graph.mesh)?;

        let (kind, ids_seconds) = self.step(ids, graph.sharding(ids), &whole)?;
        if !matches!(kind, StepKind::AllGather { .. }) || kind.axes() != axes {
            return None;
        }
        let (kind, sum_seconds) = self.step(result, &partial, graph.sharding(result))?;
        if !matches!(kind, StepKind::ReduceScatter { .. }) || kind.axes() != axes {
            return None;
        }
        let (_, table_seconds) = self.step(table, graph.sharding(table), graph.sharding(full))?;

        let copy = self.gathered(ids, &whole);
        let ids_seconds = if copy.is_some() { 0.0 } else { ids_seconds };
        let faster = ids_seconds + sum_seconds < table_seconds;
        let smaller = self.bytes(graph.ty(result), &partial)
            <= self.bytes(graph.ty(full), graph.sharding(full));
        let res = Lookup { gather, table, axes, ids: whole, copy, partial };
        (faster && smaller).then_some(res)
    }

    /// The collective that moves a tensor like `value`, and the seconds that it takes.
    fn step(&self, value: Value, from: &Sharding, to: &Sharding) -> Option<(StepKind, f64)> {
        let (ty, mesh) = (self.graph.ty(value), &self.graph.mesh);
        let kind = placement::classify(from, to, &ty.shape, mesh)?;
        let step = Step { kind, to: to.clone() };
        let cost = CommCost::default();
        let bytes = ty.dtype.bytes();
        Some((kind, placement::step_cost(&step, from, &ty.shape, bytes, mesh, &cost)))
    }

    /// The first node that gathers `value` alone and as `wanted`.
    fn gathered(&self, value: Value, wanted: &Sharding) -> Option<Node> {
        let gathers = self.graph.nodes.iter().filter(|(node, data)| {
            let gather =
                matches!(&data.op, Op::Collective(it) if it.kind == CollectiveKind::AllGather);
            gather
                && self.places[*node].is_some()
                && data.inputs[..] == [value]
                && self.graph.sharding(data.results[0]) == wanted
        });
        gathers.map(|it| it.0).min_by_key(|&it| self.places[it])
    }

    fn bytes(&self, ty: &TensorType, sharding: &Sharding) -> u64 {
        sharding.local_elements(&ty.shape, &self.graph.mesh) * ty.dtype.bytes()
    }

    /// A collective of `input`, without a result, in the module and section of `node`.
    fn collective(
        &mut self,
        node: Node,
        kind: CollectiveKind,
        axes: AxisSet,
        input: Value,
    ) -> Node {
        let (section, scope) = (self.graph.nodes[node].section, self.graph.nodes[node].scope);
        let op = Collective { kind, axes }.into();
        self.graph.add_node(NewNode { op, inputs: &[input], results: &[], section, scope })
    }

    /// A value of the type of `like`, laid out as `sharding`; its maker follows.
    fn leaf(&mut self, name: &str, like: Value, sharding: Sharding) -> Value {
        let (ty, def) = (self.graph.ty(like).clone(), self.graph.values[like].def);
        let value = Builder::new(self.graph).leaf(name, ty, def);
        self.graph.values[value].sharding = Some(sharding);
        value
    }
}
