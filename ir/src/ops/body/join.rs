//! Factors of a body: those of its steps, as one where they are of one dimension of a value.
//!
//! ```text
//! glu    0 1, 0 1 -> 0 1                    0 is (A a), in pieces
//! amax   (A a) b -> A                       body   (A a) b, (A a) b -> (A a) b, A
//! ```
//!
//! What a step makes as a partial value another step cannot read, so that the factors over which it is partial must be
//! whole. So must be those of which a result does not know, as its step does not have them.

use smallvec::{SmallVec, smallvec};

use super::{Body, of};
use crate::ops::factors::{DimFactors, Dims};
use crate::ops::{Factor, Factors, Linear};
use crate::types::TensorType;

/// The index of a factor in [`Join::factors`].
type Id = usize;

/// Factors that are found to be the same, or to consist of others.
#[derive(Default)]
struct Join {
    factors: Vec<(Factor, Link)>,
    n_splits: usize,
}

/// The most factors that are split in two; the next one cannot be cut. With the most dims they are fewer than 256.
const MAX_SPLITS: usize = 90;

#[derive(Clone, Copy)]
enum Link {
    /// It is one of the body's factors.
    Root,
    /// Another is the same.
    Same(Id),
    /// It consists of two, major first.
    Split(Id, Id),
}

/// Factors of each dimension of a value.
type Value = SmallVec<[SmallVec<[Id; 2]>; 4]>;

/// The factors of a body on operands of these types.
pub(in crate::ops) fn factors(body: &Body, inputs: &[&TensorType]) -> Factors {
    let types = body.types(inputs).expect("operands are well-typed");
    let mut join = Join::default();
    let mut values: Vec<Option<Value>> = vec![None; inputs.len()];
    let mut steps: Vec<(Factors, SmallVec<[Id; 8]>)> = Vec::new();
    for (first, step) in body.numbered() {
        let made: SmallVec<[u8; 4]> = (first..first + step.n_results).collect();
        let factors = step.op.factors(&of(&types, &step.inputs), &of(&types, &made));
        let ids: SmallVec<[Id; 8]> = factors.factors.iter().map(|&it| join.push(it)).collect();
        let value = |dims: &Dims| -> Value {
            dims.iter().map(|it| it.iter().map(|&it| ids[usize::from(it)]).collect()).collect()
        };
        for (&input, dims) in step.inputs.iter().zip(&factors.inputs) {
            let read = value(dims);
            match &values[usize::from(input)] {
                Some(known) => {
                    known.iter().zip(&read).for_each(|(a, b)| join.unify(a, b));
                }
                None => values[usize::from(input)] = Some(read),
            }
        }
        values.extend(factors.results.iter().map(|it| Some(value(it))));
        steps.push((factors, ids));
    }
    let values: Vec<Value> =
        values.into_iter().map(|it| it.expect("a step has each value")).collect();
    join.keep_whole(body, &values, &steps);
    join.finish(body, &values, &steps, inputs.len())
}

impl Join {
    fn push(&mut self, factor: Factor) -> Id {
        self.factors.push((factor, Link::Root));
        self.factors.len() - 1
    }

    /// Adds the roots of a factor, major to minor.
    fn roots(&self, id: Id, res: &mut SmallVec<[Id; 8]>) {
        match self.factors[id].1 {
            Link::Root => res.push(id),
            Link::Same(it) => self.roots(it, res),
            Link::Split(major, minor) => {
                self.roots(major, res);
                self.roots(minor, res);
            }
        }
    }

    fn all_roots(&self, ids: impl IntoIterator<Item = Id>) -> SmallVec<[Id; 8]> {
        let mut res = SmallVec::new();
        ids.into_iter().for_each(|it| self.roots(it, &mut res));
        res
    }

    /// Makes one of the factors of a dimension as two ops see it.
    fn unify(&mut self, a: &[Id], b: &[Id]) {
        let (mut a, mut b) = (self.all_roots(a.to_vec()), self.all_roots(b.to_vec()));
        a.reverse();
        b.reverse();
        while let (Some(x), Some(y)) = (a.last().copied(), b.last().copied()) {
            // One that is equal to a factor in front of it, or a part of one.
            if !matches!(self.factors[x].1, Link::Root) || !matches!(self.factors[y].1, Link::Root)
            {
                for (list, id) in [(&mut a, x), (&mut b, y)] {
                    list.pop();
                    let mut roots = self.all_roots([id]);
                    roots.reverse();
                    list.extend(roots);
                }
                continue;
            }
            let (m, n) = (self.factors[x].0.size, self.factors[y].0.size);
            match (m, n) {
                _ if x == y || m == n => {
                    a.pop();
                    b.pop();
                    self.same(x, y);
                }
                _ if self.n_splits == MAX_SPLITS => break,
                _ if n > 0 && m.is_multiple_of(n) => self.split(x, n),
                _ if m > 0 && n.is_multiple_of(m) => self.split(y, m),
                _ => break,
            }
        }
        // What does not correspond cannot be cut.
        a.into_iter().chain(b).for_each(|it| self.whole(it));
    }

    fn same(&mut self, a: Id, b: Id) {
        if a == b {
            return;
        }
        let Factor { whole, even, contiguous, .. } = self.factors[b].0;
        let to = &mut self.factors[a].0;
        to.whole |= whole;
        to.even |= even;
        to.contiguous |= contiguous;
        self.factors[b].1 = Link::Same(a);
    }

    /// Splits a factor into one of size `major` and the rest.
    fn split(&mut self, id: Id, major: u64) {
        self.n_splits += 1;
        let factor = self.factors[id].0;
        let first = self.push(Factor { size: major, ..factor });
        // A contiguous range of both is one of the first only.
        let whole = factor.whole || factor.contiguous;
        let second = self.push(Factor { size: factor.size / major, whole, ..factor });
        self.factors[id].1 = Link::Split(first, second);
    }

    fn whole(&mut self, id: Id) {
        self.all_roots([id]).into_iter().for_each(|it| self.factors[it].0.whole = true);
    }

    /// See the [module docs](self).
    fn keep_whole(
        &mut self,
        body: &Body,
        values: &[Value],
        steps: &[(Factors, SmallVec<[Id; 8]>)],
    ) {
        let all = self.all_roots(steps.iter().flat_map(|it| it.1.iter().copied()));
        for ((first, step), (factors, ids)) in body.numbered().zip(steps) {
            let own = self.all_roots(ids.iter().copied());
            for index in 0..step.n_results {
                let slot = first + index;
                let value = self.all_roots(values[usize::from(slot)].iter().flatten().copied());
                let lacks = |it: &Id| !value.contains(it);
                let partial = own.iter().copied().filter(lacks);
                let read = body.steps().iter().any(|it| it.inputs.contains(&slot));
                let adds = index == 0 && !factors.addends.is_empty();
                let mut kept: SmallVec<[Id; 8]> = SmallVec::new();
                if factors.alike.contains(&index) {
                    continue;
                }
                if read || adds {
                    kept.extend(partial);
                }
                if body.result_of(slot).is_some() {
                    kept.extend(all.iter().copied().filter(|it| lacks(it) && !own.contains(it)));
                }
                kept.into_iter().for_each(|it| self.whole(it));
            }
        }
    }

    fn finish(
        self,
        body: &Body,
        values: &[Value],
        steps: &[(Factors, SmallVec<[Id; 8]>)],
        n_operands: usize,
    ) -> Factors {
        let mut order: SmallVec<[Id; 8]> = SmallVec::new();
        let mut dims = |value: &Value| -> Dims {
            let dim = |ids: &SmallVec<[Id; 2]>| -> DimFactors {
                let roots = self.all_roots(ids.iter().copied());
                let number = |id: Id| match order.iter().position(|&it| it == id) {
                    Some(at) => at as u8,
                    None => {
                        order.push(id);
                        (order.len() - 1) as u8
                    }
                };
                roots.into_iter().map(number).collect()
            };
            value.iter().map(dim).collect()
        };
        let inputs = values[..n_operands].iter().map(&mut dims).collect();
        let results = body.results().iter().map(|&it| dims(&values[usize::from(it)])).collect();
        let makers = body.results().iter().map(|&it| body.0.maker(it).expect("a step makes it"));
        let makers: SmallVec<[(usize, usize); 4]> = makers.collect();
        let mut names: SmallVec<[char; 8]> = SmallVec::new();
        let factor = |&id: &Id| {
            let mut factor = self.factors[id].0;
            let free = |it: &char| !names.contains(it);
            let mut letters = std::iter::once(factor.name).chain('a'..='z').chain('A'..='Z');
            factor.name = letters.find(free).unwrap_or('?');
            names.push(factor.name);
            factor
        };
        let linear = steps.iter().all(|it| it.0.linear == Linear::Joint && it.0.addends.is_empty());
        let alike = |it: &(usize, &(usize, usize))| {
            let (step, index) = *it.1;
            steps[step].0.alike.contains(&(index as u8))
        };
        Factors {
            factors: order.iter().map(factor).collect(),
            inputs,
            results,
            reduce: makers.iter().map(|&(step, index)| steps[step].0.reduce[index]).collect(),
            linear: if linear { Linear::Joint } else { Linear::No },
            addends: smallvec![],
            alike: makers.iter().enumerate().filter(alike).map(|it| it.0 as u8).collect(),
        }
    }
}
