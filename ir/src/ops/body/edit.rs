//! Making bodies of ops and of other bodies. Steps whose results nothing needs are left out.

use smallvec::SmallVec;

use super::{Body, Slot, Step};
use crate::ops::{Cast, Op, TypeError};
use crate::types::{DType, TensorType};

/// The operand of an op that is to be part of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// An operand of the body.
    Operand(usize),
    /// A result of the body.
    Result(usize),
    /// One more operand of the body, of this type.
    New(DType),
}

/// A body whose steps are in any order.
struct Draft {
    operands: SmallVec<[DType; 4]>,
    steps: Vec<(Op, SmallVec<[At; 4]>, u8)>,
    results: Vec<At>,
}

/// A value of a draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Operand(usize),
    /// A step, and which of its results.
    Made(usize, usize),
}

impl Body {
    /// A body that does what `op` does to operands of these types.
    pub fn of(
        op: &Op,
        operands: impl IntoIterator<Item = DType>,
        n_results: usize,
    ) -> Option<Body> {
        if let Op::Fused(it) = op {
            return Some(it.body.clone());
        }
        let operands: SmallVec<[DType; 4]> = operands.into_iter().collect();
        let inputs = (0..operands.len()).map(At::Operand).collect();
        let results = (0..n_results).map(|it| At::Made(0, it)).collect();
        Draft { steps: vec![(op.clone(), inputs, n_results as u8)], operands, results }.finish()
    }

    /// A body that also applies `op` to what `inputs` names. The results of `op` follow all others.
    pub fn then(&self, op: &Op, inputs: &[Source], n_results: usize) -> Option<Body> {
        let mut draft = Draft::of(self);
        let results = draft.results.clone();
        let mut dtypes = SmallVec::<[DType; 4]>::new();
        let mut at = |it: &Source| match *it {
            Source::Operand(it) => At::Operand(it),
            Source::Result(it) => results[it],
            Source::New(dtype) => {
                draft.operands.push(dtype);
                At::Operand(draft.operands.len() - 1)
            }
        };
        let inputs: SmallVec<[At; 4]> = inputs.iter().map(&mut at).collect();
        // Types of its operands are not looked at: those of a body are its own.
        dtypes.resize(inputs.len(), DType::F32);
        let other = Draft::of(&Body::of(op, dtypes, n_results)?);
        let first = draft.steps.len();
        let moved = |it: At| match it {
            At::Operand(it) => inputs[it],
            At::Made(step, index) => At::Made(first + step, index),
        };
        for (op, inputs, n) in other.steps {
            draft.steps.push((op, inputs.into_iter().map(moved).collect(), n));
        }
        draft.results.extend(other.results.into_iter().map(moved));
        draft.finish()
    }

    /// The same with these of its results, in this order. Every operand must still be read.
    pub fn returning(&self, results: &[usize]) -> Option<Body> {
        let mut draft = Draft::of(self);
        draft.results = results.iter().map(|&it| draft.results[it]).collect();
        draft.finish()
    }

    /// The same where `op` makes a result in place of another, and as many results; more follow that result.
    pub fn with_maker(&self, result: usize, op: Op, n_results: usize) -> Option<Body> {
        let mut draft = Draft::of(self);
        let At::Made(step, _) = draft.results[result] else { return None };
        let known = usize::from(draft.steps[step].2);
        draft.steps[step].0 = op;
        draft.steps[step].2 = n_results as u8;
        for index in known..n_results {
            draft.results.insert(result + 1 + index - known, At::Made(step, index));
        }
        draft.finish()
    }

    /// The op that does the same, if a body is of one.
    pub fn alone(&self) -> Option<&Op> {
        let [step] = self.steps() else { return None };
        let n = self.0.operands.len() as Slot;
        let all = step.inputs.iter().copied().eq(0..n)
            && self.0.results.iter().copied().eq(n..n + step.n_results);
        all.then_some(&step.op)
    }

    /// The same with a result that is computed in f32, on operands of these types, and not rounded: operands of the
    /// step that makes it are cast, and its other results are cast back. What reads the result reads it in f32.
    pub fn widened(
        &self,
        result: usize,
        inputs: &[&TensorType],
    ) -> Result<Option<Body>, TypeError> {
        let types = self.types(inputs)?;
        let mut draft = Draft::of(self);
        let at = draft.results[result];
        let firsts: Vec<Slot> = self.numbered().map(|it| it.0).collect();
        let dtype = |at: At| match at {
            At::Operand(it) => types[it].dtype,
            At::Made(step, index) => types[usize::from(firsts[step]) + index].dtype,
        };
        let At::Made(step, _) = at else { return Ok(None) };
        if dtype(at) == DType::F32 {
            return Ok(Some(self.clone()));
        }
        if let (Op::Cast(_), &[wide @ At::Made(..)]) =
            (&draft.steps[step].0, &draft.steps[step].1[..])
            && dtype(wide) == DType::F32
        {
            draft.replace(at, wide, usize::MAX);
            return Ok(draft.finish());
        }
        for i in 0..draft.steps[step].1.len() {
            let input = draft.steps[step].1[i];
            if dtype(input).is_float() && dtype(input) != DType::F32 {
                draft.steps[step].1[i] = draft.cast(input, DType::F32);
            }
        }
        for index in 0..usize::from(draft.steps[step].2) {
            let other = At::Made(step, index);
            if other != at && dtype(other).is_float() && dtype(other) != DType::F32 {
                let cast = draft.cast(other, dtype(other));
                let At::Made(maker, _) = cast else { continue };
                draft.replace(other, cast, maker);
            }
        }
        Ok(draft.finish())
    }
}

impl Draft {
    fn of(body: &Body) -> Draft {
        let at = |&slot: &Slot| match body.0.maker(slot) {
            Some((step, index)) => At::Made(step, index),
            None => At::Operand(slot.into()),
        };
        let step = |it: &Step| (it.op.clone(), it.inputs.iter().map(at).collect(), it.n_results);
        Draft {
            operands: body.0.operands.clone(),
            steps: body.steps().iter().map(step).collect(),
            results: body.results().iter().map(at).collect(),
        }
    }

    /// A value in another type, by a cast that may be there already.
    fn cast(&mut self, of: At, to: DType) -> At {
        let cast: Op = Cast { to }.into();
        let known = self.steps.iter().position(|it| it.0 == cast && it.1[..] == [of]);
        let step = known.unwrap_or_else(|| {
            self.steps.push((cast, SmallVec::from_elem(of, 1), 1));
            self.steps.len() - 1
        });
        At::Made(step, 0)
    }

    /// Lets all that needs `old` have `new`, but for one step.
    fn replace(&mut self, old: At, new: At, but: usize) {
        let steps = self.steps.iter_mut().enumerate().filter(|it| it.0 != but);
        let inputs = steps.flat_map(|it| it.1.1.iter_mut());
        inputs.chain(&mut self.results).filter(|it| **it == old).for_each(|it| *it = new);
    }

    /// The steps that are needed, each behind what it needs. `None` if it is no body.
    fn finish(self) -> Option<Body> {
        let mut first: Vec<Option<Slot>> = vec![None; self.steps.len()];
        let mut needed = vec![false; self.steps.len()];
        let mut open: Vec<At> = self.results.clone();
        while let Some(at) = open.pop() {
            if let At::Made(step, _) = at
                && !std::mem::replace(&mut needed[step], true)
            {
                open.extend(&self.steps[step].1);
            }
        }
        let mut steps = Vec::new();
        let mut next = self.operands.len();
        for step in (0..self.steps.len()).filter(|&it| needed[it]) {
            self.emit(step, &mut first, &mut steps, &mut next)?;
        }
        let results: Option<Vec<Slot>> = self.results.iter().map(|&it| slot(it, &first)).collect();
        Body::new(self.operands, steps, results?).ok()
    }

    fn emit(
        &self,
        step: usize,
        first: &mut [Option<Slot>],
        steps: &mut Vec<Step>,
        next: &mut usize,
    ) -> Option<()> {
        if first[step].is_some() {
            return Some(());
        }
        let (op, inputs, n_results) = &self.steps[step];
        for input in inputs {
            if let At::Made(maker, _) = *input {
                self.emit(maker, first, steps, next)?;
            }
        }
        let inputs: Option<SmallVec<[Slot; 4]>> =
            inputs.iter().map(|&it| slot(it, first)).collect();
        steps.push(Step { op: op.clone(), inputs: inputs?, n_results: *n_results });
        first[step] = Some(Slot::try_from(*next).ok()?);
        *next += usize::from(*n_results);
        Some(())
    }
}

fn slot(at: At, first: &[Option<Slot>]) -> Option<Slot> {
    match at {
        At::Operand(it) => Slot::try_from(it).ok(),
        At::Made(step, index) => first[step]?.checked_add(index as Slot),
    }
}
