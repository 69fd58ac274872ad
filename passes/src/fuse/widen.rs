//! A cast to f32 of what was summed in f32: the op that sums does not round in between.

use ir::ops::{Cast, Step, SumLeading};
use ir::{DType, Node, Op, Value};

use super::Walk;

impl Walk<'_> {
    pub(super) fn widen(&mut self, node: Node) {
        let data = &self.graph.nodes[node];
        let (input, result) = (data.inputs[0], data.results[0]);
        // One gradient of a layer norm is wide already when the other was.
        if self.graph.ty(input).dtype != DType::F32 {
            if !self.can_be_wide(input, node) {
                return;
            }
            self.make_wide(input);
        }
        let Some((maker, index)) = self.sole(input, node) else { return };
        self.hand_over(result, maker, index);
        self.remove(node);
    }

    /// Whether `value`, which only `reader` reads, can be made in f32.
    fn can_be_wide(&self, value: Value, reader: Node) -> bool {
        let Some((maker, index)) = self.sole(value, reader) else { return false };
        let data = &self.graph.nodes[maker];
        match &data.op {
            Op::Matmul(it) => {
                let plain = !it.bias && !it.gelu;
                plain && (!it.accumulate || self.can_be_wide(data.inputs[2], maker))
            }
            Op::QuantMatmul(it) => {
                !it.bias && (!it.accumulate || self.can_be_wide(data.inputs[4], maker))
            }
            Op::Add(_) => data.inputs.iter().all(|&it| self.can_be_wide(it, maker)),
            Op::EmbeddingGrad(_) => true,
            Op::RmsNormGrad(_) => index == 1,
            Op::LayerNormGrad(_) => {
                index > 0 && data.results[1..].iter().all(|&it| it == value || self.is_widened(it))
            }
            op => matches!(op.maker(index).0, Op::SumLeading(_)),
        }
    }

    /// Whether nothing but a cast to f32 reads `value`, if anything does.
    fn is_widened(&self, value: Value) -> bool {
        let reader = self.readers[value].last().map(|&it| &self.graph.nodes[it].op);
        match self.n_reads[value] {
            0 => true,
            1 => matches!(reader, Some(Op::Cast(Cast { to: DType::F32 }))),
            _ => false,
        }
    }

    /// Makes `value` in f32, and what is added up to it.
    fn make_wide(&mut self, value: Value) {
        let Some(maker) = self.graph.producer(value) else { return };
        self.graph.values[value].ty.dtype = DType::F32;
        let data = &mut self.graph.nodes[maker];
        let wide = Some(DType::F32);
        match &mut data.op {
            Op::Matmul(it) => {
                it.out = wide;
                if it.accumulate {
                    let c = data.inputs[2];
                    self.make_wide(c);
                }
            }
            Op::QuantMatmul(it) => {
                it.out = DType::F32;
                if it.accumulate {
                    let c = data.inputs[4];
                    self.make_wide(c);
                }
            }
            Op::Add(_) => data.inputs.clone().into_iter().for_each(|it| self.make_wide(it)),
            Op::EmbeddingGrad(it) => it.out = wide,
            Op::SumLeading(it) => it.out = wide,
            Op::RmsNormGrad(it) => it.out = wide,
            Op::LayerNormGrad(it) => {
                it.out = wide;
                let [_, dw, db] = data.results[..] else { return };
                self.graph.values[dw].ty.dtype = DType::F32;
                self.graph.values[db].ty.dtype = DType::F32;
            }
            Op::Fused(it) => {
                let index = data.results.iter().position(|&it| it == value);
                let slot = it.body.results()[index.expect("it makes the value")];
                let sum =
                    |first, _: &Step| (first == slot).then(|| SumLeading { out: wide }.into());
                it.body = it.body.replaced(sum).expect("it is a sum");
            }
            _ => (),
        }
    }
}
