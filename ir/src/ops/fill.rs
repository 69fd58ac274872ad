//! `fill`: a tensor of one value, made from nothing.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::{
    Factors, LocalCx, Number, Numbers, Op, OpDef, Real, Sample, TypeError, Types, View, ViewMut,
    arity,
};
use crate::range::{Ranged, RealRange};
use crate::types::{DType, TensorType};

/// See the [module docs](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fill {
    /// Every element.
    pub value: Number,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<u64>,
}

impl Fill {
    /// A tensor of `ty` with `value` everywhere.
    pub fn new(value: f64, ty: &TensorType) -> Fill {
        Fill { value: value.into(), dtype: ty.dtype, shape: ty.shape.to_vec() }
    }
}

impl OpDef for Fill {
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 0)?;
        Ok(smallvec![TensorType::new(self.dtype, &self.shape)])
    }

    fn numbers(&self) -> Numbers {
        smallvec![Ranged::new("value", self.value, RealRange::Finite)]
    }

    /// Padding must stay zero, so only zeros may be cut unevenly.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let res = Factors::new("-> *", inputs, results);
        if self.value == Number(0.0) { res } else { res.even("*") }
    }

    fn reference<T: Real>(
        &self,
        _inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        results[0].data.fill(T::from_f64(self.value.0));
    }

    fn localize(&self, results: &[&[u64]]) -> Option<Op> {
        Some(Fill { shape: results[0].to_vec(), ..self.clone() }.into())
    }

    fn by_products(&self) -> &'static [usize] {
        &[0]
    }

    fn is_zero(&self) -> bool {
        self.value.0 == 0.0
    }

    fn samples() -> Vec<Sample> {
        vec![Sample {
            op: Fill::new(0.5, &TensorType::new(DType::F32, &[4, 6])).into(),
            inputs: vec![],
        }]
    }
}
