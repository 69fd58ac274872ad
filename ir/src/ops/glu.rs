//! `glu`: a gated linear unit, `act(gate) * up`.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    ActivationKind, Amaxes, Factors, GluGrad, GradCx, GradError, Grads, LocalCx, OpDef, Real,
    Sample, TypeError, Types, View, ViewMut, arity, floats, is_default, same_type,
};
use crate::types::TensorType;

/// See the [module docs](self). Operands: `gate`, `up`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Glu {
    /// The gate's function.
    pub kind: GluKind,
    /// Also returns the amax of the result.
    #[serde(default, skip_serializing_if = "is_default")]
    pub amax: Amaxes,
}

/// Which function the gate goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GluKind {
    /// `silu`.
    Swiglu,
    /// `gelu`, exactly.
    Geglu,
    /// `gelu_tanh`.
    GegluTanh,
    /// `relu`.
    Reglu,
}

impl GluKind {
    /// All of them.
    pub const ALL: [GluKind; 4] =
        [GluKind::Swiglu, GluKind::Geglu, GluKind::GegluTanh, GluKind::Reglu];

    /// The gate's function.
    pub fn activation(self) -> ActivationKind {
        match self {
            GluKind::Swiglu => ActivationKind::Silu,
            GluKind::Geglu => ActivationKind::Gelu,
            GluKind::GegluTanh => ActivationKind::GeluTanh,
            GluKind::Reglu => ActivationKind::Relu,
        }
    }
}

impl OpDef for Glu {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 2)?;
        floats(inputs, 0)?;
        same_type(inputs, 1)?;
        self.amax.infer(smallvec![inputs[0].clone()])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        self.amax.factors(Factors::new("*, * -> *", inputs, self.amax.own(results)))
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let (results, amaxes) = self.amax.split(results);
        let kind = self.kind.activation();
        let operands = inputs[0].data.iter().zip(inputs[1].data);
        for (out, (&gate, &up)) in results[0].data.iter_mut().zip(operands) {
            *out = kind.apply(gate) * up;
        }
        self.amax.reference(results, amaxes);
    }

    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        if !self.amax.is_none() {
            return Err(cx.not_differentiable());
        }
        let (gate, up, grad) = (cx.inputs[0], cx.inputs[1], cx.grad(0));
        let op = GluGrad { kind: self.kind, recompute: false, amax: Amaxes::default() };
        let res = cx.ops(&[0, 1], op, &[grad, gate, up])?;
        Ok(res.into_iter().map(Some).collect())
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 0)]
    }

    fn localize(&self, results: &[&[u64]]) -> Option<crate::Op> {
        let amax = self.amax.localize(results)?;
        Some(Glu { amax, ..self.clone() }.into())
    }

    fn samples() -> Vec<Sample> {
        let sample = |kind, amax| Sample::floats(Glu { kind, amax }, &[&[4, 6], &[4, 6]]);
        let plain = GluKind::ALL.map(|kind| sample(kind, Amaxes::default()));
        let pieces = [vec![], vec![(0, 2)], vec![(0, 4), (1, 2)]];
        let amaxes = pieces.map(|pieces| Amaxes { of: vec![0], pieces });
        plain.into_iter().chain(amaxes.map(|it| sample(GluKind::Swiglu, it))).collect()
    }
}
