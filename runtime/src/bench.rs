//! Timing a plan: the median of some steps, where the time of one goes, the memory it takes.

use std::collections::BTreeMap;

use ir::ops::Engine;
use ir::plan::{Buffer, Instruction, Plan, PlanSection};
use kernels::Proved;

use crate::bind::At;
use crate::data::Data;
use crate::error::RunError;
use crate::exec::{MemoryUse, Span};
use crate::place::Place;
use crate::session::{Session, SessionOptions};

/// How to time.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// Steps before, which are not timed.
    pub warmup: u64,
    /// Steps to time; at least 1.
    pub steps: u64,
    /// Seed of weights and tokens.
    pub seed: u64,
    /// Where to run.
    pub place: Place,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct BenchReport {
    /// Seconds of each timed step.
    pub seconds: Vec<f64>,
    /// Seconds of the first step of all: compiling, choosing algorithms, capturing.
    pub first: f64,
    /// Tokens of the global batch.
    pub tokens: u64,
    /// The loss of the last step.
    pub loss: Option<f32>,
    /// Milliseconds by kind of one more step, in which every instruction is timed, on the first rank
    /// of this process.
    pub kinds: BTreeMap<Kind, f64>,
    /// The same by what was run (an op with its attributes and the local shapes of its operands, or a
    /// kind of collective): how often, and milliseconds.
    pub instructions: BTreeMap<String, (u64, f64)>,
    /// What each rank of this process takes.
    pub memory: Vec<MemoryUse>,
}

/// What time goes into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Matrix products.
    Gemm,
    /// Attention and its gradient.
    Attention,
    /// Norm of the gradients and optimizer.
    Update,
    /// Collectives that the compute stream waits for.
    Exposed,
    /// Every other op: norms, activations, embedding, loss, casts.
    Other,
    /// Collectives, whether anything waits for them or not.
    Collectives,
}

impl Kind {
    /// As reports call it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Gemm => "GEMM",
            Kind::Attention => "attention",
            Kind::Update => "optimizer",
            Kind::Exposed => "collectives exposed",
            Kind::Other => "other",
            Kind::Collectives => "collectives in all",
        }
    }
}

impl BenchReport {
    /// The median of [`BenchReport::seconds`].
    pub fn median(&self) -> f64 {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        (sorted[n / 2] + sorted[(n - 1) / 2]) / 2.0
    }
}

/// Times steps on generated tokens and random weights.
pub fn bench(plan: &Proved, options: &BenchOptions) -> Result<BenchReport, RunError> {
    let data = Data::synthetic(&plan.run, options.seed);
    let same = [("seed", options.seed), ("warmup", options.warmup), ("steps", options.steps)];
    let hosted = options.place.host(plan, &same)?;
    let session = SessionOptions { seed: options.seed, ..SessionOptions::default() };
    let session = options.place.start(plan, &session, hosted)?;
    session.prepare()?;
    let (mut first, mut seconds, mut loss) = (None, Vec::new(), None);
    let last = options.warmup + options.steps.max(1);
    for step in 1..=last {
        let batch = data.batch(step - 1)?;
        let report = session.step(&batch, plan.run.schedule.at(step - 1), step)?;
        first.get_or_insert(report.seconds);
        loss = report.loss;
        if step > options.warmup {
            seconds.push(report.seconds);
        }
    }
    let (kinds, instructions) = time_of_one(plan, &session, &data, last + 1)?;
    Ok(BenchReport {
        seconds,
        first: first.unwrap_or_default(),
        tokens: plan.run.global_batch * plan.run.sequence,
        loss,
        kinds,
        instructions,
        memory: session.memory()?,
    })
}

/// [`BenchReport::kinds`] and [`BenchReport::instructions`].
type Times = (BTreeMap<Kind, f64>, BTreeMap<String, (u64, f64)>);

/// Runs one step with times kept.
fn time_of_one(plan: &Plan, session: &Session, data: &Data, step: u64) -> Result<Times, RunError> {
    let (mut kinds, mut instructions) = Times::default();
    let mut add = |spans: Vec<Vec<Span>>| {
        for span in spans.first().into_iter().flatten() {
            let ms = span.end - span.start;
            for kind in kinds_of(plan, span) {
                *kinds.entry(kind).or_default() += ms;
            }
            if let Some(at) = span.at {
                let entry = instructions.entry(what(plan, at)).or_insert((0, 0.0));
                *entry = (entry.0 + 1, entry.1 + ms);
            }
        }
    };
    session.keep_times(true)?;
    let batch = data.batch(step - 1)?;
    session.start_step(plan.run.schedule.at(step - 1))?;
    for micro_batch in 0..plan.micro_batches {
        session.micro_batch(&batch, step, micro_batch)?;
        add(session.times()?);
    }
    session.update()?;
    add(session.times()?);
    session.keep_times(false)?;
    Ok((kinds, instructions))
}

/// `matmul(transpose_b:true) bf16[1, 8192, 4096], bf16[4096, 4096]`, `all_gather(dp) 9 parts`.
fn what(plan: &Plan, at: At) -> String {
    match &plan.section(at.section)[at.index] {
        Instruction::Compute { op, args, .. } => {
            let operand = |&it: &Buffer| {
                let shape = plan.local_shape(it).to_vec();
                format!("{}{shape:?}", plan.buffers[it].ty.dtype)
            };
            let operands: Vec<String> = args.iter().map(operand).collect();
            format!("{} {}", op.to_text(), operands.join(", "))
        }
        Instruction::Collective { kind, comm, parts, .. } => {
            format!("{}({}) {} parts", kind.name(), plan.mesh.names(plan.comms[*comm]), parts.len())
        }
        Instruction::Copy { .. } => "copy".to_string(),
        Instruction::Record { .. } | Instruction::Wait { .. } => "wait".to_string(),
    }
}

/// What a span counts as. A collective on the compute stream is exposed by itself.
fn kinds_of(plan: &Plan, span: &Span) -> Vec<Kind> {
    let compute = span.stream.as_u32() == 0;
    let Some(at) = span.at else {
        return if compute { vec![Kind::Exposed] } else { Vec::new() };
    };
    match &plan.section(at.section)[at.index] {
        Instruction::Compute { op, .. } => vec![match op.engine() {
            Engine::Gemm | Engine::Fp8Gemm { .. } => Kind::Gemm,
            Engine::Attention => Kind::Attention,
            Engine::Memory if at.section == PlanSection::Update => Kind::Update,
            Engine::Memory => Kind::Other,
        }],
        Instruction::Collective { kind, .. } if kind.is_local() => vec![Kind::Other],
        Instruction::Collective { .. } if compute => vec![Kind::Collectives, Kind::Exposed],
        Instruction::Collective { .. } => vec![Kind::Collectives],
        Instruction::Copy { .. } => vec![Kind::Other],
        Instruction::Wait { .. } | Instruction::Record { .. } => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between_the_middle_two() {
        let report = |seconds: &[f64]| BenchReport {
            seconds: seconds.to_vec(),
            first: 0.0,
            tokens: 0,
            loss: None,
            kinds: BTreeMap::new(),
            instructions: BTreeMap::new(),
            memory: Vec::new(),
        };
        assert_eq!(report(&[3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(report(&[4.0, 1.0, 2.0, 3.0]).median(), 2.5);
    }
}
