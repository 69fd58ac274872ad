//! A sum of pieces, each in zeros where the others are: the pieces one after the other.
//!
//! ```text
//! %a = pad_dim(dim:1, start:0, size:8) %x     %s = concat(dim:1) %x, %y
//! %b = pad_dim(dim:1, start:5, size:8) %y
//! %s = add %a, %b
//! ```

use ir::ops::Concat;
use ir::{Node, Op, Value};
use smallvec::SmallVec;

use super::Walk;

/// Where a piece starts, the piece, and what pads it.
type Piece = (u64, Value, Node);

impl Walk<'_> {
    /// `node` is a sum; false if it is none of pieces that fill the dimension.
    pub(super) fn pads(&mut self, node: Node) -> bool {
        let Some((dim, pads)) = self.pieces(node) else { return false };
        let data = &mut self.graph.nodes[node];
        data.op = Concat { dim }.into();
        data.inputs = pads.iter().map(|it| it.1).collect();
        pads.iter().for_each(|it| self.remove(it.2));
        true
    }

    /// The dimension, and the pieces in order.
    fn pieces(&self, node: Node) -> Option<(usize, SmallVec<[Piece; 8]>)> {
        let graph = &*self.graph;
        let data = &graph.nodes[node];
        let result = data.results[0];
        let (mut along, mut size) = (None, None);
        let mut res = SmallVec::new();
        for &input in &data.inputs {
            let (maker, 0) = self.sole(input, node)? else { return None };
            let Op::PadDim(pad) = &graph.nodes[maker].op else { return None };
            let alike = graph.ty(input) == graph.ty(result)
                && graph.sharding(input) == graph.sharding(result)
                && *along.get_or_insert(pad.dim) == pad.dim;
            if !alike {
                return None;
            }
            size = Some(pad.size);
            res.push((pad.start, graph.nodes[maker].inputs[0], maker));
        }
        let dim = along?;
        res.sort_by_key(|it: &Piece| it.0);
        let mut end = 0;
        for &(start, piece, _) in &res {
            if start != end {
                return None;
            }
            end += graph.ty(piece).shape[dim];
        }
        (Some(end) == size).then_some((dim, res))
    }
}
