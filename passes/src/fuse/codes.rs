//! FP8 codes under delayed scaling, whose scale is there before the tensor: what makes it makes its codes instead.
//!
//! ```text
//! %y, %rstd = rms_norm %x, %w            %s, %i = delayed_scale %y.scale
//! %s, %i = delayed_scale %y.scale        %y.codes, %rstd, %y.amax = rms_norm(amax:(of:[0]),codes:(of:[(0,e4m3)])) %x, %w, %s
//! %y.amax = amax %y
//! %y.codes = quantize(to:e4m3) %y, %s
//! ```
//!
//! Nothing else may read the tensor, which is not there any more. Columns are rows transposed, as before, but no
//! longer made with them: both are of one scale, and a transpose reads a byte where `quantize` reads two.
//!
//! The tensor is not rounded before it is quantized, and its amax is that of what is computed in f32. So this changes
//! bits, and is what the recipe says (`te-spec` 1.8). It says otherwise of scales that are not of a history.

use ir::ops::{Copies, Quantize};
use ir::{DType, Node, Op, Value};
use smallvec::SmallVec;

use super::amax::n_observed;
use super::{Place, Walk};

/// The node that makes an amax, and the values that it has until it is in a history.
type Observer = (Node, SmallVec<[Value; 2]>);

impl Walk<'_> {
    pub(super) fn codes(&mut self, node: Node) {
        let data = &self.graph.nodes[node];
        let Op::Quantize(Quantize { to, copies: Copies::Rows, ref sums, .. }) = data.op else {
            return;
        };
        let (x, scale, results) = (data.inputs[0], data.inputs[1], data.results.clone());
        let sum = sums.of.first().map(|it| it.1);
        let Some((maker, of)) = self.maker(x, node) else { return };
        let op = &mut self.graph.nodes[maker].op;
        let sums = sum.is_none() || op.sums_mut().is_some();
        if of >= n_observed(op) || op.codes().is_none() || !sums {
            return;
        }
        let Some(scale_first) = self.scale_before(scale, maker) else { return };
        let Some(readers) = self.others_of(x, node) else { return };
        if let Some((amax, wide)) = readers {
            self.amax(amax);
            if self.places[amax].is_some() {
                return;
            }
            wide.into_iter().for_each(|it| self.graph.values[it].ty.dtype = DType::F32);
        }
        if let Some((scaler, place)) = scale_first {
            self.places[scaler] = Some(place);
        }
        let data = &mut self.graph.nodes[maker];
        let codes = data.op.codes_mut().expect("it can make some");
        codes.push((of, to));
        data.inputs.push(scale);
        self.n_reads[x] -= 1;
        self.hand_over(results[0], maker, of);
        if let (Some(to), Some(sums)) = (sum, self.graph.nodes[maker].op.sums_mut()) {
            sums.push((of, to));
            let index = self.graph.nodes[maker].results.len();
            self.hand_over(results[1], maker, index);
        }
        self.remove(node);
    }

    /// What makes the scale of a history, and where it must move to be in front of `maker`, if it must; `None` if it
    /// is no such scale, or needs what is made later.
    fn scale_before(&self, scale: Value, maker: Node) -> Option<Option<(Node, Place)>> {
        let scaler = self.graph.producer(scale)?;
        let data = &self.graph.nodes[scaler];
        let Op::DelayedScale(_) = data.op else { return None };
        let (at, n) = self.place(maker);
        if self.place(scaler) < (at, n) {
            return Some(None);
        }
        let before = if n > 0 { (at, n - 1) } else { (at - 1, u32::MAX) };
        (self.since(data.inputs[0]) < before).then_some(Some((scaler, before)))
    }

    /// What reads `x` besides `node`, if that is nothing, or the amax that goes into a history and may be watched.
    fn others_of(&self, x: Value, node: Node) -> Option<Option<Observer>> {
        if self.n_reads[x] == 1 {
            return Some(None);
        }
        let amax = *self.readers[x].iter().find(|&&it| it != node)?;
        let data = &self.graph.nodes[amax];
        if self.n_reads[x] != 2 || !matches!(data.op, Op::Amax(_)) {
            return None;
        }
        let mut values = SmallVec::new();
        let mut value = data.results[0];
        loop {
            values.push(value);
            let readers = &self.readers[value];
            let watches = |it: &&Node| matches!(self.graph.nodes[**it].op, Op::Watch(_));
            let mut others = readers.iter().filter(|it| !watches(it));
            let (Some(&reader), None) = (others.next(), others.next()) else { return None };
            if self.n_reads[value] as usize != readers.len() {
                return None;
            }
            let data = &self.graph.nodes[reader];
            match data.op {
                Op::DelayedUpdate(_) => return Some(Some((amax, values))),
                Op::Collective(_) => value = data.results[0],
                _ => return None,
            }
        }
    }
}
