//! Launch for `adamw`, `adam` and `sgd`: one for all tensors of a batch.
//!
//! ```text
//! table       14 words for each tensor: p m v g, then p m v compute and the amax of p as results, elements,
//!             decay, first chunk, then t as operand and result
//!             1 word for each chunk of a tensor: which tensor, and in the upper half which chunk of it
//! workspace   the amax of each chunk, if those of tensors are asked for
//! ```
//!
//! `scale`, `lr` and `applied` are those of the first call. A last launch counts the update in each `t`, which
//! blocks of the one before read.

use ir::checkpoint::Optimizer;
use ir::{DType, Op};

use crate::cuda::amax;
use crate::cuda::launch::{arg, double, elements, grid, launch, need, null, sized, typed};
use crate::cuda::{Arg, Function, OpCall, Operand, Pointer, Program, Unsupported, Word};

/// Elements of a block; `CHUNK` of `optimizer.cu` and of `sum_squares.cu`.
pub(super) const CHUNK: u64 = 32768;
/// Threads of a block; `THREADS` of both.
pub(super) const BLOCK: u32 = 256;
/// Words of a tensor in the table.
const WORDS: usize = 14;

/// What differs between the optimizers.
struct Step {
    entry: &'static str,
    /// How many of `p`, `m`, `v` there are.
    states: usize,
    /// True if `t` follows them.
    counts: bool,
    /// Its numbers.
    numbers: Vec<Arg>,
}

pub(super) fn lower(calls: &[OpCall<'_>]) -> Result<Program, Unsupported> {
    let call = &calls[0];
    let step = step(call)?;
    let grad = step.grad();
    (step.states..grad).try_for_each(|index| need(call, index, DType::F32))?;
    (grad + 1..grad + 4).try_for_each(|index| need(call, index, DType::F32))?;
    let amaxes = call.op.amaxes().filter(|it| !it.is_none());
    if let Some(amaxes) = amaxes {
        if amaxes.of != [0] {
            return Err(Unsupported::new(call, "it takes the amax of its first result"));
        }
        calls.iter().try_for_each(|it| amax::places(it, amaxes).map(drop))?;
    }
    let table = table(calls, &step);
    let n_chunks: u64 = chunks(calls).map(Word::n).sum();
    let defines = defines(call, &step);
    let chunks = Pointer::Table((WORDS * calls.len()) as u32);
    let mut args = vec![Arg::Pointer(Pointer::Table(0)), Arg::Pointer(chunks)];
    args.extend((grad + 1..grad + 4).map(arg));
    args.extend(step.numbers);
    let function = |entry| Function { source: "optimizer.cu", defines: defines.clone(), entry };
    let parts = if amaxes.is_some() { Arg::Pointer(Pointer::Workspace(0)) } else { null() };
    if call.op.amaxes().is_some() {
        args.push(parts);
    }
    let mut res = Program { table, ..Program::default() };
    if n_chunks > 0 {
        res.work.push(launch(function(step.entry), grid(call, n_chunks)?, BLOCK, args));
    }
    if amaxes.is_some() {
        let args = vec![Arg::Pointer(Pointer::Table(0)), parts];
        let grid = grid(call, calls.len() as u64)?;
        res.work.push(launch(function("largest"), grid, BLOCK, args));
        // Never empty, so that the pointer to it is one.
        res.workspace = (4 * n_chunks.max(1)).next_multiple_of(256);
    }
    if step.counts {
        let n = calls.len() as u64;
        let args = vec![Arg::Pointer(Pointer::Table(0)), arg(grad + 3), Arg::I64(n as i64)];
        let grid = grid(call, n.div_ceil(u64::from(BLOCK)))?;
        res.work.push(launch(function("count"), grid, BLOCK, args));
    }
    Ok(res)
}

impl Step {
    /// The operand that is the gradient, behind all that is replaced. It is also the number of the first result that is
    /// no new state.
    fn grad(&self) -> usize {
        self.states + usize::from(self.counts)
    }
}

fn step(call: &OpCall<'_>) -> Result<Step, Unsupported> {
    let trains = call.op.trains().ok_or_else(|| Unsupported::new(call, "it trains nothing"))?;
    Ok(match trains.optimizer {
        Optimizer::Adam { decoupled, betas: (beta1, beta2), eps, .. } => Step {
            entry: if decoupled { "adamw" } else { "adam" },
            states: 3,
            counts: true,
            numbers: vec![double(beta1), double(beta2), Arg::F32(eps as f32)],
        },
        Optimizer::Sgd { momentum, .. } => Step {
            entry: "sgd",
            states: trains.grad(),
            counts: false,
            numbers: vec![Arg::F32(momentum as f32)],
        },
    })
}

fn weight_decay(op: &Op) -> f64 {
    op.trains().map_or(0.0, |it| match it.optimizer {
        Optimizer::Adam { weight_decay, .. } | Optimizer::Sgd { weight_decay, .. } => weight_decay,
    })
}

/// What a tensor has not is declared as f32 and not touched.
fn defines(call: &OpCall<'_>, step: &Step) -> Vec<String> {
    let states = step.states;
    let state = |index: usize| if index < states { call.args[index].dtype } else { DType::F32 };
    let mut res = vec![
        typed("P", state(0)),
        typed("M", state(1)),
        typed("V", state(2)),
        typed("G", call.args[step.grad()].dtype),
    ];
    if let Some(compute) = own(call).get(step.grad()) {
        res.push(typed("COMPUTE", compute.dtype));
    }
    if own(call).len() < call.results.len() {
        res.push(sized("AMAX", 1));
    }
    if step.entry == "sgd" && states == 2 {
        res.push("MOMENTUM=1".into());
    }
    res
}

/// Results but for amaxes.
fn own<'a>(call: &OpCall<'a>) -> &'a [Operand] {
    call.op.amaxes().map_or(call.results, |it| it.own(call.results))
}

fn table(calls: &[OpCall<'_>], step: &Step) -> Vec<Word> {
    let (states, grad) = (step.states, step.grad());
    let mut res = Vec::new();
    let (mut args, mut results, mut first_chunk) = (0, 0, 0);
    for call in calls {
        let n_own = own(call).len();
        let given = |index: usize| Word::Pointer(Pointer::Arg((args + index) as u32));
        let made = |index: usize, end: usize| match index < end {
            true => Word::Pointer(Pointer::Result((results + index) as u32)),
            false => Word::Value(0),
        };
        let or_nothing = |index: usize, word: Word| match index < states {
            true => word,
            false => Word::Value(0),
        };
        res.extend((0..3).map(|it| or_nothing(it, given(it))));
        res.push(given(grad));
        res.extend((0..3).map(|it| or_nothing(it, made(it, n_own))));
        res.push(made(grad, n_own));
        res.push(made(n_own, call.results.len()));
        res.push(Word::Value(elements(&call.args[0])));
        res.push(Word::Value(weight_decay(call.op).to_bits()));
        res.push(Word::Value(first_chunk));
        match step.counts {
            true => res.extend([given(states), made(states, n_own)]),
            false => res.extend([Word::Value(0), Word::Value(0)]),
        }
        first_chunk += elements(&call.args[0]).div_ceil(CHUNK);
        args += call.args.len();
        results += call.results.len();
    }
    res.extend(chunks(calls));
    res
}

/// Every (tensor, chunk) pair of the first operands.
pub(super) fn chunks(calls: &[OpCall<'_>]) -> impl Iterator<Item = Word> {
    let chunks = |(tensor, call): (usize, &OpCall<'_>)| Word::Pieces {
        of: tensor as u32,
        n: elements(&call.args[0]).div_ceil(CHUNK),
    };
    calls.iter().enumerate().map(chunks)
}
