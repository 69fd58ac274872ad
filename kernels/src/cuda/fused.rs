//! The table of bodies that one kernel runs: [`runs`].
//!
//! ```text
//! map        activation, glu, their gradients, or a glu and its gradient; of each result
//!              what is stored      itself, cast or not, or its FP8 data by a scale that is there
//!              its amax            as it is stored; of FP8 data, as it is computed
//!              its column sums     as it is computed
//! quantize   with the column sums of what it reads
//! ```
//!
//! A kernel computes in f32. So what reads a result as it is computed must read it in f32: a body says so by casts of
//! the operands. An amax is the same of what is computed and of what is stored, as rounding keeps the order.

use ir::ops::{
    Activation, ActivationGrad, Body, Copies, Fused, Glu, GluGrad, Quantize, Slot, Step,
};
use ir::{DType, Op};
use smallvec::{SmallVec, smallvec};

/// Returns true if one kernel runs the op as it stands, for operands and results of a rank that it takes.
pub fn runs(op: &Op) -> bool {
    Map::of(op).is_some() || Summed::of(op).is_some()
}

/// An elementwise map and what is done with its results.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Map<'a> {
    pub core: Core<'a>,
    /// The operands of the op that are those of the map.
    pub args: SmallVec<[usize; 3]>,
    /// Results of the map, in its order.
    pub made: SmallVec<[Made; 3]>,
}

/// The function of a map.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Core<'a> {
    Activation(&'a Activation),
    ActivationGrad(&'a ActivationGrad),
    Glu(&'a Glu),
    GluGrad(&'a GluGrad),
    /// With what the glu makes as a third result.
    GluGradAndGlu(&'a GluGrad),
}

/// A result of a map.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Made {
    /// The number of the op's result that it is, itself or as FP8 data.
    pub at: usize,
    /// The operand that is its scale, if it is FP8 data.
    pub scale: Option<usize>,
    /// The number of the result that is its amax.
    pub amax: Option<usize>,
    /// The number of the result that is its column sums.
    pub sum: Option<usize>,
}

impl<'a> Core<'a> {
    fn of(op: &'a Op) -> Option<Core<'a>> {
        match op {
            Op::Activation(it) => Some(Core::Activation(it)),
            Op::ActivationGrad(it) => Some(Core::ActivationGrad(it)),
            Op::Glu(it) => Some(Core::Glu(it)),
            Op::GluGrad(it) => Some(Core::GluGrad(it)),
            _ => None,
        }
    }

    fn n_args(self) -> usize {
        match self {
            Core::Activation(_) => 1,
            Core::ActivationGrad(_) | Core::Glu(_) => 2,
            Core::GluGrad(_) | Core::GluGradAndGlu(_) => 3,
        }
    }

    /// Returns true if its kernel can sum columns.
    pub fn sums(self) -> bool {
        match self {
            Core::Activation(_) | Core::Glu(_) => false,
            Core::ActivationGrad(_) | Core::GluGrad(_) | Core::GluGradAndGlu(_) => true,
        }
    }

    fn n_results(self) -> usize {
        match self {
            Core::Activation(_) | Core::ActivationGrad(_) | Core::Glu(_) => 1,
            Core::GluGrad(_) => 2,
            Core::GluGradAndGlu(_) => 3,
        }
    }
}

impl<'a> Map<'a> {
    /// The map that an op is, alone or as a body.
    pub fn of(op: &'a Op) -> Option<Map<'a>> {
        let Op::Fused(Fused { body }) = op else {
            let core = Core::of(op)?;
            let made = (0..core.n_results()).map(|at| Made { at, ..Made::default() });
            return Some(Map { core, args: (0..core.n_args()).collect(), made: made.collect() });
        };
        Matcher::new(body)?.map()
    }
}

/// A body while it is compared with a map.
struct Matcher<'a> {
    body: &'a Body,
    core: Core<'a>,
    /// Operands of the map.
    args: SmallVec<[Slot; 3]>,
    /// Results of the map.
    own: SmallVec<[Slot; 3]>,
    /// True for results that are computed of operands in f32, so that they are not rounded.
    wide: SmallVec<[bool; 3]>,
    /// The same cast to what is stored.
    stored: SmallVec<[Option<Slot>; 3]>,
}

impl<'a> Matcher<'a> {
    /// Finds the ops of the map.
    fn new(body: &'a Body) -> Option<Matcher<'a>> {
        let mut res: Option<Matcher<'a>> = None;
        for (first, step) in body.numbered() {
            let Some(core) = Core::of(&step.op) else { continue };
            let own = first..first + step.n_results;
            let reads: Option<SmallVec<[(Slot, bool); 3]>> =
                step.inputs.iter().map(|&it| operand(body, it)).collect();
            let reads = reads?;
            let args: SmallVec<[Slot; 3]> = reads.iter().map(|it| it.0).collect();
            let wide = reads.iter().all(|it| it.1);
            if (args.len(), own.len()) != (core.n_args(), core.n_results()) {
                return None;
            }
            match &mut res {
                None => {
                    let (stored, wide) = (smallvec![None; own.len()], smallvec![wide; own.len()]);
                    res = Some(Matcher { body, core, args, own: own.collect(), wide, stored });
                }
                Some(it) => match (it.core, core) {
                    (Core::GluGrad(grad), Core::Glu(glu))
                        if grad.kind == glu.kind && it.args[1..] == args[..] =>
                    {
                        it.core = Core::GluGradAndGlu(grad);
                        it.wide.push(wide);
                        it.own.extend(own);
                        it.stored.push(None);
                    }
                    _ => return None,
                },
            }
        }
        res
    }

    /// Sees that all else is done with its results.
    fn map(mut self) -> Option<Map<'a>> {
        let mut made: SmallVec<[Made; 3]> = smallvec![Made::default(); self.own.len()];
        let mut is_stored: SmallVec<[bool; 3]> = smallvec![false; self.own.len()];
        for (i, &slot) in self.own.iter().enumerate() {
            if let Some(at) = self.body.result_of(slot) {
                (made[i].at, is_stored[i]) = (at, true);
            }
        }
        // Casts and FP8 data first: what an amax is of depends on them.
        for (first, step) in self.body.numbered() {
            let (Op::Cast(_) | Op::Quantize(_), Some(i)) = (&step.op, self.own_of(step)) else {
                continue;
            };
            let at = self.body.result_of(first)?;
            if !self.wide[i] || std::mem::replace(&mut is_stored[i], true) {
                return None;
            }
            made[i].at = at;
            match &step.op {
                Op::Quantize(it) if is_plain(it) && step.inputs.len() == 2 => {
                    made[i].scale = Some(self.operand(step.inputs[1])?);
                }
                Op::Cast(it) if it.to.is_float() => self.stored[i] = Some(first),
                _ => return None,
            }
        }
        for (first, step) in self.body.numbered() {
            let result = self.body.result_of(first);
            match &step.op {
                op if Core::of(op).is_some() => (),
                Op::Cast(_)
                    if operand(self.body, first).is_some() || self.own_of(step).is_some() => {}
                Op::Quantize(_) if self.own_of(step).is_some() => (),
                Op::Amax(_) => {
                    let read = *step.inputs.first()?;
                    let stored = |i: &usize| self.stored[*i].unwrap_or(self.own[*i]) == read;
                    let i = (0..self.own.len()).find(stored)?;
                    if made[i].amax.replace(result?).is_some() {
                        return None;
                    }
                }
                Op::SumLeading(_) => {
                    let i = self.own_of(step).filter(|&it| self.wide[it])?;
                    if made[i].sum.replace(result?).is_some() {
                        return None;
                    }
                }
                _ => return None,
            }
        }
        let sums = made.iter().any(|it| it.sum.is_some());
        if !is_stored.iter().all(|it| *it) || sums && !self.core.sums() {
            return None;
        }
        let args = self.args.iter().map(|&it| usize::from(it)).collect();
        Some(Map { core: self.core, args, made })
    }

    /// The number of the map's result that a step reads first.
    fn own_of(&self, step: &Step) -> Option<usize> {
        self.own.iter().position(|it| step.inputs.first() == Some(it))
    }

    fn operand(&self, slot: Slot) -> Option<usize> {
        (usize::from(slot) < self.body.operands().len()).then_some(slot.into())
    }
}

/// The operand of a body that a value is, and whether the value is f32: of itself or by a cast.
fn operand(body: &Body, slot: Slot) -> Option<(Slot, bool)> {
    match body.maker(slot) {
        None => Some((slot, body.operands()[usize::from(slot)] == DType::F32)),
        Some((Step { op: Op::Cast(it), inputs, .. }, _)) if it.to == DType::F32 => {
            let of = *inputs.first()?;
            body.maker(of).is_none().then_some((of, true))
        }
        Some(_) => None,
    }
}

/// Returns true if it makes rows with one scale.
fn is_plain(op: &Quantize) -> bool {
    op.copies == Copies::Rows && op.pieces.is_empty()
}

/// A `quantize`, alone or with the sums of its columns.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Summed<'a> {
    pub quantize: &'a Quantize,
    /// The numbers of the results that are copies, in their order.
    pub copies: SmallVec<[usize; 2]>,
    /// The number of the result that is the sums.
    pub sum: Option<usize>,
}

impl<'a> Summed<'a> {
    /// The result in the order of the tensor.
    pub fn rows(&self) -> Option<usize> {
        self.copies.first().copied().filter(|_| self.quantize.copies.rows())
    }

    /// The result with the last dimension first.
    pub fn columns(&self) -> Option<usize> {
        self.copies.last().copied().filter(|_| self.quantize.copies.columns())
    }

    pub fn of(op: &'a Op) -> Option<Summed<'a>> {
        let body = match op {
            Op::Quantize(quantize) => {
                let n = if quantize.copies == Copies::Both { 2 } else { 1 };
                return Some(Summed { quantize, copies: (0..n).collect(), sum: None });
            }
            Op::Fused(it) => &it.body,
            _ => return None,
        };
        let (mut res, mut sum) = (None, None);
        for (first, step) in body.numbered() {
            match (&step.op, &step.inputs[..]) {
                (Op::Quantize(quantize), [0, 1]) if res.is_none() => {
                    let made = first..first + step.n_results;
                    let copies = made.map(|it| body.result_of(it)).collect::<Option<_>>()?;
                    res = Some((quantize, copies));
                }
                (Op::SumLeading(_), [0]) if sum.is_none() => sum = Some(body.result_of(first)?),
                _ => return None,
            }
        }
        let (quantize, copies) = res?;
        Some(Summed { quantize, copies, sum })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(body: &str) -> Op {
        Op::from_text(&format!("fused(body:\"{body}\")"))
            .unwrap_or_else(|it| panic!("{body}: {it}"))
    }

    #[track_caller]
    fn refused(body: &str) {
        assert!(!runs(&op(body)), "{body}");
    }

    #[test]
    fn a_map_is_found_between_casts() {
        let body = op("(bf16, bf16, bf16, f32) { %4 = cast(to:f32) %0; %5 = cast(to:f32) %1; \
             %6 = cast(to:f32) %2; %7, %8 = glu_grad(kind:swiglu) %4, %5, %6; %9 = cast(to:bf16) %8; \
             %10 = amax %9; %11 = quantize(to:e5m2) %7, %3; %12 = glu(kind:swiglu) %1, %2; \
             %13 = sum_leading(out:Some(bf16)) %7; return %9, %12, %11, %10, %13 }");
        let map = Map::of(&body).expect("it is one");
        assert_eq!(map.args[..], [0, 1, 2]);
        let dgate = Made { at: 2, scale: Some(3), amax: None, sum: Some(4) };
        let dup = Made { at: 0, scale: None, amax: Some(3), sum: None };
        assert_eq!(map.made[..], [dgate, dup, Made { at: 1, ..Made::default() }]);
    }

    /// A kernel does not round before it quantizes or sums.
    #[test]
    fn what_is_rounded_first_is_refused() {
        refused(
            "(bf16, f32) { %2 = activation(kind:relu) %0; %3 = quantize(to:e4m3) %2, %1; return %3 }",
        );
        refused(
            "(bf16, bf16) { %2 = activation_grad(kind:relu) %0, %1; %3 = sum_leading %2; return %2, %3 }",
        );
    }

    #[test]
    fn what_no_kernel_gives_is_refused() {
        refused(
            "(f32, f32) { %2 = activation(kind:relu) %0; %3 = quantize(to:e4m3) %2, %1; return %2, %3 }",
        );
        refused("(f32) { %1 = activation(kind:relu) %0; %2 = amax %1; return %2 }");
        refused("(f32) { %1 = activation(kind:relu) %0; %2 = amax %0; return %1, %2 }");
        refused(
            "(f32) { %1 = activation(kind:relu) %0; %2 = activation(kind:relu) %1; return %2 }",
        );
        refused("(f32) { %1 = activation(kind:relu) %0; %2 = sum_leading %1; return %1, %2 }");
        refused("(f32, f32) { %2 = quantize(to:e4m3) %0, %1; %3 = sum_leading %1; return %2, %3 }");
    }
}
