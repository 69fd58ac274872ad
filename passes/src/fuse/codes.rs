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

use super::{Joined, Place, Walk};

/// The node that makes an amax, and the values that it has until it is in a history.
type Observer = (Node, SmallVec<[Value; 2]>);

impl Walk<'_> {
    pub(super) fn codes(&mut self, node: Node) {
        let data = &self.graph.nodes[node];
        let Op::Quantize(Quantize { to, copies: Copies::Rows, .. }) = *data.op.maker(0).0 else {
            return;
        };
        let (x, scale, results) = (data.inputs[0], data.inputs[1], data.results.clone());
        let Some((maker, of)) = self.maker(x, node) else { return };
        let op = &self.graph.nodes[maker].op;
        let flagged = op.codes().is_some();
        if flagged && (of > 0 || results.len() > 1) {
            return;
        }
        let Some(scale_first) = self.scale_before(scale, maker) else { return };
        let Some(readers) = self.others_of(x, node) else { return };
        if !flagged {
            let amax = readers.as_ref().map(|it| it.0);
            let Some(joined) = self.made_as_codes(maker, amax, node) else { return };
            if !self.become_joined(maker, joined) {
                return;
            }
            amax.into_iter().for_each(|it| self.remove(it));
        }
        if let Some((amax, wide)) = readers {
            if flagged {
                self.amax(amax);
                if self.places[amax].is_some() {
                    return;
                }
            }
            wide.into_iter().for_each(|it| self.graph.values[it].ty.dtype = DType::F32);
        }
        if let Some((scaler, place)) = scale_first {
            self.places[scaler] = Some(place);
        }
        if !flagged {
            self.n_reads[x] = 0;
            self.remove(node);
            return;
        }
        let data = &mut self.graph.nodes[maker];
        let codes = data.op.codes_mut().expect("it can make some");
        codes.push((of, to));
        data.inputs.push(scale);
        self.n_reads[x] -= 1;
        self.hand_over(results[0], maker, of);
        self.remove(node);
    }

    /// Joins `maker` with the amax of what `node` quantizes, and with its codes in its place.
    fn made_as_codes(&self, maker: Node, amax: Option<Node>, node: Node) -> Option<Joined> {
        let graph = &*self.graph;
        let (x, codes) = (graph.nodes[node].inputs[0], graph.nodes[node].results[0]);
        let mut joined = Joined::of(graph, maker)?;
        if let Some(amax) = amax {
            if !self.is_of_one_piece(amax) {
                return None;
            }
            joined = joined.then(graph, amax)?;
        }
        let joined = joined.widened(graph, x)?.then(graph, node)?;
        let others = joined.results.iter().filter(|it| **it != codes);
        let results = others.map(|&it| if it == x { codes } else { it }).collect();
        joined.returning(results)
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
