//! `cse`: computes once what a section computes twice.
//!
//! Only within a section: what the backward pass computes again, it does to save memory.

use std::hash::BuildHasher;

use cranelift_entity::SecondaryMap;
use ir::placement::Sharding;
use ir::{Graph, Node, Op, Phase, Section, Value};
use rustc_hash::{FxBuildHasher, FxHashMap};
use smallvec::SmallVec;

use crate::{Pass, PassError};

/// See the [module docs](self).
pub struct Cse;

impl Pass<Graph> for Cse {
    fn name(&self) -> &'static str {
        "cse"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Explicit, Phase::Explicit)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let order = std::mem::take(&mut graph.order);
        // A map from keys would hold a second copy of most of the graph, so it is one from their hashes.
        let mut seen: FxHashMap<u64, SmallVec<[Node; 4]>> =
            FxHashMap::with_capacity_and_hasher(order.len(), FxBuildHasher);
        let mut same: SecondaryMap<Value, Option<Value>> = SecondaryMap::new();
        let mut kept = Vec::with_capacity(order.len());
        for node in order {
            for input in &mut graph.nodes[node].inputs {
                *input = same[*input].unwrap_or(*input);
            }
            let key = Key::of(graph, node);
            let alike = seen.entry(FxBuildHasher.hash_one(&key)).or_default();
            match alike.iter().copied().find(|&it| Key::of(graph, it) == key) {
                Some(first) => {
                    let results = |it: Node| graph.nodes[it].results.iter().copied();
                    for (result, first) in results(node).zip(results(first)) {
                        same[result] = Some(first);
                    }
                }
                None => {
                    alike.push(node);
                    kept.push(node);
                }
            }
        }
        graph.order = kept;
        graph.replace(&same);
        Ok(())
    }
}

/// All that two nodes have in common that compute the same.
#[derive(PartialEq, Eq, Hash)]
struct Key<'a> {
    op: &'a Op,
    inputs: &'a [Value],
    section: Section,
    shardings: SmallVec<[Option<&'a Sharding>; 2]>,
}

impl Key<'_> {
    fn of(graph: &Graph, node: Node) -> Key<'_> {
        let data = &graph.nodes[node];
        let shardings = data.results.iter().map(|&it| graph.values[it].sharding.as_ref());
        Key {
            op: &data.op,
            inputs: &data.inputs,
            section: data.section,
            shardings: shardings.collect(),
        }
    }
}
