//! `glu_grad`: gradients of `glu`, `dy, gate, up -> dgate, dup`.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, GluKind, LocalCx, OpDef, Origin, Real, Sample, TypeError, Types, View, ViewMut, arity,
    same_shape,
};
use crate::types::TensorType;

/// See the [module docs](self). Operands: `dy`, `gate`, `up`; results: `dgate`, `dup`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GluGrad {
    /// The gate's function.
    pub kind: GluKind,
}

impl GluGrad {
    /// Those of a kind, in the types of the operands.
    pub fn new(kind: GluKind) -> GluGrad {
        GluGrad { kind }
    }
}

impl OpDef for GluGrad {
    const ORIGINS: &'static [Origin] = &[Origin::Gradient];

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
        let [dgate, dup] = results else { unreachable!("two gradients") };
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

    fn is_map(&self) -> bool {
        true
    }

    fn samples() -> Vec<Sample> {
        let sample = |kind| Sample::floats(GluGrad::new(kind), &[&[4, 6], &[4, 6], &[4, 6]]);
        GluKind::ALL.map(sample).to_vec()
    }
}
