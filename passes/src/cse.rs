//! `cse`: computes once what a section computes twice.
//!
//! Only within a section: what the backward pass computes again, it does to save memory.

use cranelift_entity::SecondaryMap;
use ir::placement::Sharding;
use ir::{Graph, Op, Phase, Section, Value};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::{Pass, PassError};

/// See the [module docs](self).
pub struct Cse;

type Key = (Op, SmallVec<[Value; 3]>, Section, SmallVec<[Option<Sharding>; 2]>);

impl Pass<Graph> for Cse {
    fn name(&self) -> &'static str {
        "cse"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Explicit, Phase::Explicit)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let mut seen: FxHashMap<Key, SmallVec<[Value; 2]>> = FxHashMap::default();
        let mut same: SecondaryMap<Value, Option<Value>> = SecondaryMap::new();
        let order = std::mem::take(&mut graph.order);
        for node in order {
            for i in 0..graph.nodes[node].inputs.len() {
                let input = graph.nodes[node].inputs[i];
                graph.nodes[node].inputs[i] = same[input].unwrap_or(input);
            }
            let data = &graph.nodes[node];
            let shardings = data.results.iter().map(|&it| graph.values[it].sharding.clone());
            let key = (data.op.clone(), data.inputs.clone(), data.section, shardings.collect());
            match seen.get(&key) {
                Some(first) => {
                    for (&result, &first) in data.results.iter().zip(first) {
                        same[result] = Some(first);
                    }
                }
                None => {
                    seen.insert(key, data.results.clone());
                    graph.order.push(node);
                }
            }
        }
        graph.replace(&same);
        Ok(())
    }
}
