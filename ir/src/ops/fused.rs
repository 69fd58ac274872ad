//! `fused`: a small program of ops that runs as one; see [`Body`].
//!
//! All that an op must know follows from its steps. Fusion comes after gradients, so it has none.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::ops::{
    Body, Factors, LocalCx, Numbers, Op, OpDef, Origin, Real, Sample, Slot, StandsFor, Step,
    TypeError, Types, Values, View, ViewMut, body,
};
use crate::text::ParseError;
use crate::types::TensorType;

/// See the [module docs](self). Operands and results are those of the body.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "Text", try_from = "Text")]
pub struct Fused {
    /// The program that it runs.
    pub body: Body,
}

/// The form of attributes.
#[derive(Serialize, Deserialize)]
struct Text {
    body: String,
}

impl From<Fused> for Text {
    fn from(it: Fused) -> Text {
        Text { body: it.body.to_string() }
    }
}

impl TryFrom<Text> for Fused {
    type Error = ParseError;

    fn try_from(it: Text) -> Result<Fused, ParseError> {
        Ok(Fused { body: crate::text::parse_body(&it.body)? })
    }
}

impl OpDef for Fused {
    const ORIGINS: &'static [Origin] = &[];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        let types = self.body.types(inputs)?;
        Ok(self.body.results().iter().map(|&it| types[usize::from(it)].clone()).collect())
    }

    fn numbers(&self) -> Numbers {
        self.body.steps().iter().flat_map(|it| it.op.numbers()).collect()
    }

    fn factors(&self, inputs: &[&TensorType], _results: &[&TensorType]) -> Factors {
        body::factors(&self.body, inputs)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let cx = LocalCx { bounds: &[] };
        self.body.run(inputs, results, |op, inputs, results| op.reference(inputs, results, &cx));
    }

    fn in_place(&self) -> &[(usize, usize)] {
        self.body.in_place()
    }

    /// Steps whose attributes are sizes make results, and nothing else.
    fn localize(&self, results: &[&[u64]]) -> Option<Op> {
        let local = |first: Slot, step: &Step| {
            let made = first..first + step.n_results;
            let shapes = made.map(|it| self.body.result_of(it).map(|it| results[it]));
            step.op.localize(&shapes.collect::<Option<SmallVec<[&[u64]; 2]>>>()?)
        };
        Some(Fused { body: self.body.replaced(local)? }.into())
    }

    fn stands_for(&self, inputs: &[&TensorType]) -> StandsFor {
        let kind = |it: &&Step| !matches!(it.op, Op::Cast(_));
        match self.body.steps().iter().find(kind) {
            Some(it) => match it.op.stands_for(inputs) {
                StandsFor::Itself => StandsFor::Op(it.op.kind()),
                other => other,
            },
            None => StandsFor::Operand,
        }
    }

    fn flops(&self, inputs: &[&[u64]], _results: &[&[u64]]) -> u64 {
        self.body.sum(inputs, Op::flops)
    }

    fn model_flops(&self, inputs: &[&[u64]], _results: &[&[u64]]) -> u64 {
        self.body.sum(inputs, Op::model_flops)
    }

    fn is_fused(&self) -> bool {
        true
    }

    fn rounds_inside(&self) -> bool {
        self.body.steps().iter().any(|it| it.op.rounds_inside())
    }

    /// As what makes the first result, of an operand as it is stored.
    fn is_form(&self) -> bool {
        let maker = self.body.maker(self.body.results()[0]);
        maker.is_some_and(|(it, _)| it.op.is_form() && self.body.maker(it.inputs[0]).is_none())
    }

    fn first_gradients(&self) -> &[usize] {
        self.body.first_gradients()
    }

    fn samples() -> Vec<Sample> {
        samples()
    }
}

impl Op {
    /// The name of the op, or those of the ops that it is made of: `glu+amax`.
    pub fn name(&self) -> &str {
        match self {
            Op::Fused(it) => it.body.name(),
            other => other.kind().name(),
        }
    }

    /// The ops that it is made of; otherwise the op itself.
    pub fn parts(&self) -> impl Iterator<Item = &Op> {
        let steps = match self {
            Op::Fused(it) => it.body.steps(),
            _ => &[],
        };
        let alone = steps.is_empty().then_some(self);
        alone.into_iter().chain(steps.iter().map(|it| &it.op))
    }

    /// Returns true if it makes FP8 data of what it computes, and not of an operand as it is stored.
    pub fn makes_codes(&self) -> bool {
        let Op::Fused(Fused { body }) = self else {
            return self.codes().is_some_and(|it| !it.is_none());
        };
        let quantizes = |it: &Step| matches!(it.op, Op::Quantize(_) | Op::QuantizeBlock(_));
        body.steps().iter().any(|it| quantizes(it) && body.maker(it.inputs[0]).is_some())
    }

    /// The op that makes a result, and which of its own results that is.
    pub fn maker(&self, result: usize) -> (&Op, usize) {
        let Op::Fused(it) = self else { return (self, result) };
        let slot = it.body.results()[result];
        let (step, index) = it.body.maker(slot).expect("a step makes a result");
        (&step.op, index)
    }
}

/// Bodies that kernels run, and one of steps that no kernel has together.
const SAMPLES: &[(&str, &[&[u64]])] = &[
    (
        "(f32, f32) { %2 = glu(kind:swiglu) %0, %1; %3 = amax %2; return %2, %3 }",
        &[&[4, 6], &[4, 6]],
    ),
    (
        "(f32, f32) { %2 = glu(kind:swiglu) %0, %1; %3 = amax(pieces:[(0,4),(1,2)]) %2; return %2, %3 }",
        &[&[4, 6], &[4, 6]],
    ),
    (
        "(f32, f32, f32) { %3 = glu(kind:swiglu) %0, %1; %4 = amax %3; %5 = quantize(to:e4m3) %3, %2; return %5, %4 }",
        &[&[4, 6], &[4, 6], &[]],
    ),
    (
        "(f32) { %1 = activation(kind:gelu) %0; %2 = amax(pieces:[(0,2)]) %1; return %1, %2 }",
        &[&[4, 5]],
    ),
    (
        "(f32, f32) { %2 = activation(kind:gelu) %0; %3 = quantize(to:e5m2) %2, %1; return %3 }",
        &[&[4, 5], &[]],
    ),
    (
        "(f32, f32) { %2 = activation_grad(kind:gelu) %0, %1; %3 = amax(pieces:[(0,2)]) %2; \
         %4 = sum_leading %2; return %2, %3, %4 }",
        &[&[4, 5], &[4, 5]],
    ),
    (
        "(f32, f32, f32) { %3, %4 = glu_grad(kind:geglu) %0, %1, %2; %5 = glu(kind:geglu) %1, %2; \
         return %3, %4, %5 }",
        &[&[4, 6], &[4, 6], &[4, 6]],
    ),
    (
        "(f32, f32, f32, f32, f32) { %5, %6 = glu_grad(kind:swiglu) %0, %1, %2; \
         %7 = glu(kind:swiglu) %1, %2; %8 = amax %6; %9 = quantize(to:e5m2) %6, %3; %10 = amax %5; \
         %11 = quantize(to:e4m3) %7, %4; %12 = sum_leading %6; return %5, %9, %11, %8, %10, %12 }",
        &[&[4, 6], &[4, 6], &[4, 6], &[], &[]],
    ),
    (
        "(f32, f32) { %2 = quantize(to:e4m3) %0, %1; %3 = sum_leading %0; return %2, %3 }",
        &[&[4, 6], &[]],
    ),
    (
        "(f32, f32) { %2, %3 = quantize(to:e4m3,copies:Both,pieces:[0,2]) %0, %1; %4 = sum_leading %0; \
         return %2, %3, %4 }",
        &[&[4, 2, 8], &[2, 4]],
    ),
    // A reduction, a sum with what another step makes, and an op that knows sizes.
    (
        "(f32, f32) { %2 = add %0, %1; %3 = sum_leading %2; %4 = bias_add %1, %3; %5 = sum_leading %0; \
         return %4, %2, %5 }",
        &[&[2, 4, 6], &[2, 4, 6]],
    ),
    (
        "(f32, f32) { %2 = split_dim(dim:0,inner:2) %0; %3 = mul %2, %1; return %2, %3 }",
        &[&[4, 6], &[2, 2, 6]],
    ),
];

fn samples() -> Vec<Sample> {
    let sample = |&(text, shapes): &(&str, &[&[u64]])| {
        let body = crate::text::parse_body(text).expect("it is a body");
        let scales = body.steps().iter().filter(|it| matches!(it.op, Op::Quantize(_)));
        let scales: Vec<usize> = scales.map(|it| it.inputs[1].into()).collect();
        let sample = Sample::floats(Fused { body }, shapes);
        scales.into_iter().fold(sample, |sample, it| sample.fill(it, Values::Positive))
    };
    SAMPLES.iter().map(sample).collect()
}
