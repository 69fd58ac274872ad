//! `dce`: drops nodes whose results nobody reads.

use cranelift_entity::SecondaryMap;
use ir::{Graph, Phase, Value};

use crate::{Pass, PassError};

/// See the [module docs](self).
pub struct Dce;

impl Pass<Graph> for Dce {
    fn name(&self) -> &'static str {
        "dce"
    }

    fn phases(&self) -> (Phase, Phase) {
        (Phase::Explicit, Phase::Explicit)
    }

    fn run(&self, graph: &mut Graph) -> Result<(), PassError> {
        let mut live: SecondaryMap<Value, bool> = SecondaryMap::new();
        for root in graph.roots() {
            live[root] = true;
        }
        let mut kept = Vec::with_capacity(graph.order.len());
        for &node in graph.order.iter().rev() {
            let data = &graph.nodes[node];
            if data.results.iter().any(|&it| live[it]) {
                data.inputs.iter().for_each(|&it| live[it] = true);
                kept.push(node);
            }
        }
        kept.reverse();
        graph.order = kept;
        Ok(())
    }
}
