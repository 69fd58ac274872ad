//! What a plan is predicted to take on a machine: a roofline for ops, alpha-beta for collectives, and the
//! plan's own streams and events to put them side by side, where communication takes a part of the speed of ops.
//!
//! ```text
//! op           launch + flops / rate(op) + bytes / bandwidth      `compute`
//! collective   min over rings, trees and protocols of
//!              latency + hops + bytes sent / bandwidth            `link`
//! ```
//!
//! Pure functions of a [`Plan`] and a [`Target`]. FLOPs come from [`Op::flops`](crate::Op::flops), bytes on the wire
//! from [`crate::summary::traffic`]. A target holds what was measured, with its source; constants of the model are
//! derived from that here, so that the model gives back what it was calibrated on. `docs/cost.md` has every
//! prediction beside its measurement.

mod compute;
mod link;
mod target;
#[cfg(test)]
mod tests;

use cranelift_entity::EntityRef;
use serde::Serialize;

use crate::plan::{BySection, Instruction, Plan, PlanSection, Stream, StreamKind};
use crate::summary::{executed_flops, model_flops};
use compute::Ops;
use link::Links;

pub use compute::{op_seconds, work_seconds};
pub use link::Group;
pub use target::{Collectives, Figure, Gemms, Hops, Node, Source, Target, TargetError};

/// What one rank is predicted to do, all ranks being alike.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// All instructions, in running order of sections, in issue order in each.
    pub spans: Vec<Span>,
    /// When the compute stream waits for communication, in the same order.
    pub exposed: Vec<Exposed>,
    /// The number of times each section runs in a step; see [`Plan::runs`].
    pub runs: BySection<u32>,
    /// Seconds from the start of each section until all its instructions are done.
    seconds: BySection<f64>,
}

/// One instruction. Times are seconds from the start of its section; waits and records take none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// Which list it is in.
    pub section: PlanSection,
    /// Its place there.
    pub index: usize,
    /// Where it is queued.
    pub stream: Stream,
    /// When it starts.
    pub start: f64,
    /// When it is done.
    pub end: f64,
}

/// A time during which the compute stream has nothing to do until communication is done.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Exposed {
    /// The section.
    pub section: PlanSection,
    /// The collective that it waits for, as a place in the section.
    pub index: usize,
    /// Seconds from the start of the section.
    pub start: f64,
    /// Likewise.
    pub end: f64,
}

/// The figures of a step, for tables.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepCost {
    /// Seconds of a step: all micro-batches and the update.
    pub seconds: f64,
    /// Seconds of it in which the compute stream waits for communication.
    pub exposed_seconds: f64,
    /// Seconds of communication, hidden or not.
    pub communication_seconds: f64,
    /// Shares of the target's bf16 peak.
    #[serde(flatten)]
    pub of_bf16_peak: Utilization,
    /// Shares of its FP8 peak, for a plan that multiplies in FP8.
    pub of_fp8_peak: Option<Utilization>,
}

/// FLOPs of a step over what the target could do in that time, without sparsity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Utilization {
    /// Model FLOPs utilization: the FLOPs that training needs, divided by the number of ranks; see
    /// [`Summary::model_flops`](crate::summary::Summary::model_flops).
    pub mfu: f64,
    /// Hardware FLOPs utilization: the FLOPs that a rank executes; see [`Summary::flops`](crate::summary::Summary::flops).
    pub hfu: f64,
}

impl Timeline {
    /// Runs a plan on paper: each instruction starts when its stream is free and, after a wait, the event is
    /// reached; a section starts when all streams are done with the one before.
    pub fn predict(plan: &Plan, target: &Target) -> Timeline {
        let mut res = Timeline {
            spans: Vec::new(),
            exposed: Vec::new(),
            runs: PlanSection::ALL.map(|it| plan.runs(it)),
            seconds: Default::default(),
        };
        let (links, mut ops) = (Links::new(plan, target), Ops::new(plan, target));
        for section in PlanSection::ALL {
            Streams::new(plan, section, &mut res).run(&links, &mut ops);
            let ends = res.section(section).iter().map(|it| it.end);
            res.seconds[section as usize] = ends.fold(0.0, f64::max);
        }
        res
    }

    /// Instructions of a section, in issue order.
    pub fn section(&self, section: PlanSection) -> &[Span] {
        let start = self.spans.partition_point(|it| it.section < section);
        &self.spans[start..self.spans.partition_point(|it| it.section <= section)]
    }

    /// Seconds from the start of a section until all its instructions are done.
    pub fn section_seconds(&self, section: PlanSection) -> f64 {
        self.seconds[section as usize]
    }

    /// Seconds of a step: of each section, as often as it runs.
    pub fn step_seconds(&self) -> f64 {
        self.of_step(|section| self.section_seconds(section))
    }

    /// Seconds of a step in which the compute stream waits for communication.
    pub fn exposed_seconds(&self) -> f64 {
        let of = |section| {
            let its = self.exposed.iter().filter(|it| it.section == section);
            its.map(|it| it.end - it.start).fold(0.0, |sum, it| sum + it)
        };
        self.of_step(of)
    }

    /// The figures of a step of `plan`, which is the one this was predicted for.
    pub fn step_cost(&self, plan: &Plan, target: &Target) -> StepCost {
        let seconds = self.step_seconds();
        let communication = |section| {
            let is_collective = |it: &&Span| {
                let instruction = &plan.section(section)[it.index];
                matches!(instruction, Instruction::Collective { kind, .. } if !kind.is_local())
            };
            let its = self.section(section).iter().filter(is_collective);
            its.map(|it| it.end - it.start).fold(0.0, |sum, it| sum + it)
        };
        let needed = model_flops(plan) as f64 / plan.mesh.n_ranks() as f64;
        let executed = executed_flops(plan) as f64;
        let of_peak = |peak: &Figure| {
            let possible = seconds * peak.0;
            let share = |flops: f64| if possible > 0.0 { flops / possible } else { 0.0 };
            Utilization { mfu: share(needed), hfu: share(executed) }
        };
        let fp8_peak = target.fp8_peak.as_ref().filter(|_| plan.multiplies_in_fp8());
        StepCost {
            seconds,
            exposed_seconds: self.exposed_seconds(),
            communication_seconds: self.of_step(communication),
            of_bf16_peak: of_peak(&target.peak),
            of_fp8_peak: fp8_peak.map(of_peak),
        }
    }

    fn of_step(&self, of: impl Fn(PlanSection) -> f64) -> f64 {
        PlanSection::ALL
            .into_iter()
            .map(|section| f64::from(self.runs[section as usize]) * of(section))
            .sum()
    }
}

/// The streams of a section while its instructions are walked in issue order.
struct Streams<'a> {
    plan: &'a Plan,
    section: PlanSection,
    timeline: &'a mut Timeline,
    /// Of each stream: when it is free, and the collective that it did last.
    at: Vec<(f64, Option<usize>)>,
    /// The same of each event, when it was recorded.
    events: Vec<(f64, Option<usize>)>,
    /// When communication runs, as far as it is known and ops may still meet it.
    busy: Vec<(f64, f64)>,
}

impl<'a> Streams<'a> {
    fn new(plan: &'a Plan, section: PlanSection, timeline: &'a mut Timeline) -> Streams<'a> {
        let start = (0.0, None);
        let (streams, events) = (plan.streams.len(), plan.events as usize);
        let (at, events) = (vec![start; streams], vec![start; events]);
        Streams { plan, section, timeline, at, events, busy: Vec::new() }
    }

    fn run(mut self, links: &Links<'_>, ops: &mut Ops<'_>) {
        ops.start_section();
        for (index, instruction) in self.plan.section(self.section).iter().enumerate() {
            let stream = instruction.stream();
            if !matches!(instruction, Instruction::Compute { .. }) {
                ops.end_launch(stream);
            }
            let start = self.at[stream.index()].0;
            let mut end = start;
            match instruction {
                Instruction::Record { event, .. } => {
                    self.events[event.index()] = self.at[stream.index()];
                }
                Instruction::Wait { event, .. } => end = self.wait(stream, event.index()),
                Instruction::Collective { kind, comm, parts, .. } if !kind.is_local() => {
                    end += links.seconds(*kind, *comm, parts);
                    self.at[stream.index()] = (end, Some(index));
                    match self.is_compute(stream) {
                        true => self.expose(Some(index), start, end),
                        false => self.busy.push((start, end)),
                    }
                }
                Instruction::Compute { .. }
                | Instruction::Copy { .. }
                | Instruction::Collective { .. } => {
                    end = self.beside(start, ops.seconds(instruction), ops.slowdown());
                }
            }
            self.at[stream.index()].0 = end;
            let section = self.section;
            self.timeline.spans.push(Span { section, index, stream, start, end });
        }
        self.finish();
    }

    /// When an op is done that takes so long alone: while communication runs beside it, which draws on the same
    /// memory and power, it loses `slowdown` of its speed.
    fn beside(&mut self, start: f64, alone: f64, slowdown: f64) -> f64 {
        self.busy.retain(|it| it.1 > start);
        self.busy.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (mut at, mut left) = (start, alone);
        for &(from, to) in &self.busy {
            // Alone up to there, and perhaps done.
            let free = (from - at).max(0.0);
            if left <= free {
                break;
            }
            (at, left) = (at + free, left - free);
            let shared = (to - at).max(0.0).min(left / (1.0 - slowdown));
            (at, left) = (at + shared, left - shared * (1.0 - slowdown));
        }
        at + left.max(0.0)
    }

    /// `stream` waits for an event; when it goes on.
    fn wait(&mut self, stream: Stream, event: usize) -> f64 {
        let start = self.at[stream.index()].0;
        let (reached, collective) = self.events[event];
        if reached > start && self.is_compute(stream) {
            self.expose(collective, start, reached);
        }
        start.max(reached)
    }

    /// The section is over when communication is, too.
    fn finish(&mut self) {
        let compute = self.plan.streams.iter().filter(|it| it.1.kind == StreamKind::Compute);
        let compute = compute.map(|it| self.at[it.0.index()].0).fold(0.0, f64::max);
        let last = self.at.iter().copied().max_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((end, collective)) = last.filter(|it| it.0 > compute) {
            self.expose(collective, compute, end);
        }
    }

    fn expose(&mut self, collective: Option<usize>, start: f64, end: f64) {
        let section = self.section;
        let exposed = |index| Exposed { section, index, start, end };
        self.timeline.exposed.extend(collective.map(exposed));
    }

    fn is_compute(&self, stream: Stream) -> bool {
        self.plan.streams[stream].kind == StreamKind::Compute
    }
}
