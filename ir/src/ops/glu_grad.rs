//! `glu_grad`: gradients of `glu`, `dy, gate, up -> dgate, dup`.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, GluKind, LocalCx, OpDef, Real, Sample, TypeError, Types, View, ViewMut, arity,
    same_shape,
};
use crate::types::TensorType;

/// See the [module docs](self). Operands: `dy`, `gate`, `up`; results: `dgate`, `dup`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GluGrad {
    /// The gate's function.
    pub kind: GluKind,
}

impl OpDef for GluGrad {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 3)?;
        same_shape(inputs[0], inputs[1])?;
        same_shape(inputs[0], inputs[2])?;
        Ok(smallvec![inputs[1].clone(), inputs[2].clone()])
    }

    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        Factors::new("*, *, * -> *, *", inputs, results)
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let [dy, gate, up] = inputs else { unreachable!("three operands") };
        let [dgate, dup] = results else { unreachable!("two results") };
        let kind = self.kind.activation();
        let outs = dgate.data.iter_mut().zip(dup.data.iter_mut());
        let operands = dy.data.iter().zip(gate.data).zip(up.data);
        for ((dgate, dup), ((&dy, &gate), &up)) in outs.zip(operands) {
            *dgate = dy * up * kind.slope(gate);
            *dup = dy * kind.apply(gate);
        }
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        &[(0, 1), (1, 2)]
    }

    fn samples() -> Vec<Sample> {
        let sample = |kind| Sample::floats(GluGrad { kind }, &[&[4, 5], &[4, 5], &[4, 5]]);
        GluKind::ALL.map(sample).into()
    }
}
