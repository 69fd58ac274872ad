//! `watch-amaxes`: a step in which an amax is infinite is skipped as one is whose loss is not finite.
//!
//! An infinite number of an activation or a gradient may leave the loss and the norm finite, because FP8 data holds its
//! largest number in its place. So all amaxes of a step become operands of `clip_scale`, by way of `watch`:
//!
//! ```text
//! %s, %i = quant_scale %x.amax           %s, %i = quant_scale %x.amax
//! %t, %j = quant_scale %y.amax           %t, %j = quant_scale %y.amax
//!                                        %bad = watch %x.amax, %y.amax        [] sum(dp): 0 or NaN
//!                                        %bad.sum = reshard %bad              in `update`
//! %f, .. = clip_scale %n, %c, %l         %f, .. = clip_scale %n, %c, %l, %bad.sum
//! ```
//!
//! Amaxes are read as scales read them, reduced over their group. Those of one section and one sharding are operands of
//! one `watch`, and all of them are reduced in the update, where the norm is. What is quantized in blocks has no amax in
//! the program, and gets one here, of pieces as small as ranks hold, so that it needs no reduction.

use cranelift_entity::SecondaryMap;
use ir::graph::{Def, Store};
use ir::ops::{Add, Amax, Reshard, Watch};
use ir::placement::Sharding;
use ir::{BuildError, Builder, Graph, Node, Op, Phase, Section, TensorType, Value};
use smallvec::SmallVec;

use crate::{Pass, PassError};

/// See the [module docs](self).
pub struct WatchAmaxes;

impl Pass<Graph> for WatchAmaxes {
    fn name(&self) -> &'static str {
        "watch-amaxes"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Sharded, Phase::Sharded)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let is_clip = |it: &Node| matches!(graph.nodes[*it].op, Op::ClipScale(_));
        let Some(clip) = graph.order.iter().copied().find(is_clip) else { return Ok(()) };
        let order = std::mem::take(&mut graph.order);
        let (builder, seen) = (Builder::new(graph), SecondaryMap::new());
        let mut walk = Walk { builder, seen, alike: Vec::new(), watched: Vec::new() };
        walk.run(&order, clip).map_err(|it| PassError::Failed {
            code: "PL0303",
            message: it.to_string(),
            subject: Some(it.name),
        })
    }
}

struct Walk<'a> {
    builder: Builder<'a>,
    /// Amaxes, and what is in blocks, that are operands already.
    seen: SecondaryMap<Value, bool>,
    /// Amaxes of this section, by shape and sharding.
    alike: Vec<Vec<Value>>,
    /// Results of `watch`, or their sums over micro-batches.
    watched: Vec<Value>,
}

impl Walk<'_> {
    fn run(&mut self, order: &[Node], clip: Node) -> Result<(), BuildError> {
        let root = self.builder.scope;
        let mut section = Section::Prepare;
        for &node in order {
            let data = &self.builder.graph.nodes[node];
            let (now, scope) = (data.section, data.scope);
            for ended in [Section::Forward, Section::Backward] {
                if section <= ended && ended < now {
                    (self.builder.section, self.builder.scope) = (ended, root);
                    self.close(order)?;
                }
            }
            section = now;
            (self.builder.section, self.builder.scope) = (now, scope);
            if node == clip {
                self.reduce(clip)?;
            }
            self.builder.graph.order.push(node);
            if matches!(section, Section::Forward | Section::Backward) {
                self.look_at(node)?;
            }
        }
        Ok(())
    }

    /// Adds the amax that `node` reads, or that of what it quantizes in blocks, to those of this section.
    fn look_at(&mut self, node: Node) -> Result<(), BuildError> {
        let data = &self.builder.graph.nodes[node];
        if let Some(amax) = data.op.history() {
            self.add(data.inputs[amax]);
            return Ok(());
        }
        match data.op {
            Op::QuantScale(_) => self.add(data.inputs[0]),
            Op::RoundNvFp4(_) => self.add(data.inputs[1]),
            Op::QuantizeBlock(_) => {
                let x = self.before_moves(data.inputs[0]);
                if !std::mem::replace(&mut self.seen[x], true) {
                    let amax = self.amax(x)?;
                    self.add(amax);
                }
            }
            // MXFP8 keeps an infinite number infinite, and all others read what they are given.
            _ => (),
        }
        Ok(())
    }

    fn add(&mut self, amax: Value) {
        if std::mem::replace(&mut self.seen[amax], true) {
            return;
        }
        let graph = &*self.builder.graph;
        let kind = |it: Value| (&graph.ty(it).shape, graph.sharding(it));
        match self.alike.iter_mut().find(|it| kind(it[0]) == kind(amax)) {
            Some(it) => it.push(amax),
            None => self.alike.push(vec![amax]),
        }
    }

    /// `x` as it was before it was gathered or cut anew, so that what makes it can take its amax.
    fn before_moves(&self, x: Value) -> Value {
        let graph = &*self.builder.graph;
        match graph.producer(x).map(|it| &graph.nodes[it]) {
            Some(data) if matches!(data.op, Op::Reshard(_)) => match data.inputs[0] {
                it if graph.sharding(it).partial.is_none() => self.before_moves(it),
                _ => x,
            },
            _ => x,
        }
    }

    /// The amax of `x`: of each piece that a rank holds, where pieces are even.
    fn amax(&mut self, x: Value) -> Result<Value, BuildError> {
        let graph = &*self.builder.graph;
        let (ty, sharding, mesh) = (graph.ty(x), graph.sharding(x), &graph.mesh);
        let mut pieces = Vec::new();
        for (dim, (layout, &size)) in sharding.dims.iter().zip(&ty.shape).enumerate() {
            let n = mesh.set_size(layout.axis_set());
            let is_even = size.is_multiple_of(n)
                && layout.split(&[n, size / n], mesh).is_some_and(|it| it[1].is_whole());
            if n > 1 && is_even {
                pieces.push((dim, n));
            }
        }
        let name = format!("{}.amax", graph.values[x].name);
        let amax = self.op(&name, Amax { pieces }, &[x])?;
        self.whole(amax)
    }

    /// Makes one value of all amaxes that are alike; behind the backward pass, adds up those of micro-batches.
    fn close(&mut self, order: &[Node]) -> Result<(), BuildError> {
        let section = self.builder.section;
        if section == Section::Backward {
            self.add_weights(order);
        }
        for amaxes in std::mem::take(&mut self.alike) {
            let watched = self.op("amaxes.watched", Watch {}, &amaxes)?;
            self.watched.push(watched);
        }
        if section == Section::Backward && self.builder.graph.micro_batches > 1 {
            for watched in std::mem::take(&mut self.watched) {
                let sum = self.accumulate(watched)?;
                self.watched.push(sum);
            }
        }
        Ok(())
    }

    /// Adds the amaxes of weights that are kept for their histories.
    fn add_weights(&mut self, order: &[Node]) {
        for &node in order {
            let data = &self.builder.graph.nodes[node];
            if let (Section::Update, Some(amax)) = (data.section, data.op.history()) {
                self.add(data.inputs[amax]);
            }
        }
    }

    /// The sum of a value over micro-batches.
    fn accumulate(&mut self, value: Value) -> Result<Value, BuildError> {
        let data = &self.builder.graph.values[value];
        let (name, ty) = (format!("{}.acc", data.name), data.ty.clone());
        let sharding = self.builder.graph.sharding(value).clone();
        let state = self.builder.leaf(&name, ty, Def::Sum);
        self.builder.pin(state, sharding.clone());
        let sum = self.op(&format!("{name}.next"), Add {}, &[state, value])?;
        self.builder.pin(sum, sharding);
        let section = self.builder.section;
        self.builder.graph.stores.push(Store { state, value: sum, section });
        Ok(state)
    }

    /// Gives `clip_scale` what is watched, on all ranks.
    fn reduce(&mut self, clip: Node) -> Result<(), BuildError> {
        for watched in std::mem::take(&mut self.watched) {
            let whole = self.whole(watched)?;
            self.builder.graph.nodes[clip].inputs.push(whole);
        }
        Ok(())
    }

    /// `value` without a reduction that is still to come.
    fn whole(&mut self, value: Value) -> Result<Value, BuildError> {
        let graph = &*self.builder.graph;
        let sharding = graph.sharding(value);
        let Some((op, _)) = sharding.partial else { return Ok(value) };
        let whole = Sharding { partial: None, ..sharding.clone() };
        let name = format!("{}.{}", graph.values[value].name, op.name());
        let res = self.builder.op(&name, Reshard::default(), &[value])?;
        self.builder.graph.values[res].sharding = Some(whole);
        Ok(res)
    }

    /// Applies a one-result op to operands as they are laid out.
    fn op(&mut self, name: &str, op: impl Into<Op>, inputs: &[Value]) -> Result<Value, BuildError> {
        let op = op.into();
        let res = self.builder.op(name, op.clone(), inputs)?;
        let sharding = sharding(self.builder.graph, &op, inputs, res);
        self.builder.graph.values[res].sharding = Some(sharding);
        Ok(res)
    }
}

/// The sharding of the result of an op that takes its operands as they are.
fn sharding(graph: &Graph, op: &Op, inputs: &[Value], result: Value) -> Sharding {
    let types: SmallVec<[&TensorType; 4]> = inputs.iter().map(|&it| graph.ty(it)).collect();
    let shardings: SmallVec<[&Sharding; 4]> = inputs.iter().map(|&it| graph.sharding(it)).collect();
    let factors = op.factors(&types, &[graph.ty(result)]);
    let assignment = factors.assign(&shardings, &graph.mesh).expect("operands are laid out alike");
    factors.result(0, &assignment, &graph.mesh).expect("cuts are even")
}
