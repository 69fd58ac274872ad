//! Random graphs in phase `Local`, as wild as the verifier allows.

use ir::graph::{Def, NewNode, Store};
use ir::ops::{Add, Collective, CollectiveKind, Mul, ZerosLike};
use ir::placement::{self, CommCost, Mesh, Sharding};
use ir::{DType, Graph, Op, Phase, Section, TensorType, Value};

/// Random decisions from a seed (SplitMix64).
pub(super) struct Choices(pub u64);

impl Choices {
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

const LAYOUTS: [&str; 7] =
    ["[_, _]", "[a, _]", "[b, _]", "[_, a]", "[a, b]", "[_, _] sum(a)", "[_, _] sum(a, b)"];
const SECTIONS: [Section; 4] =
    [Section::Prepare, Section::Forward, Section::Backward, Section::Update];

pub(super) fn graph(choices: &mut Choices, n_nodes: usize) -> Graph {
    let mut graph = Graph::new("random", Mesh::new(&[("a", 2), ("b", 2)]));
    graph.phase = Phase::Local;
    graph.micro_batches = 2;
    let mut values = Vec::new();
    for (i, layout) in LAYOUTS.iter().enumerate() {
        let sharding = Sharding::parse(layout, &graph.mesh).expect("a layout");
        let defs = [Def::Param, Def::State, Def::State, Def::Input];
        for (n, &def) in
            defs.iter().enumerate().filter(|it| it.0 != 0 || sharding.partial.is_none())
        {
            let value = graph.add_leaf(format!("leaf{i}.{n}"), ty(), def);
            graph.values[value].sharding = Some(sharding.clone());
            values.push(value);
        }
    }
    for i in 0..n_nodes {
        let section = SECTIONS[i * SECTIONS.len() / n_nodes];
        node(&mut graph, &mut values, section, choices);
    }
    stores(&mut graph, &values, choices);
    let whole = Sharding::replicated(2);
    let mut whole = values.iter().rev().filter(|&&it| *graph.sharding(it) == whole);
    if let Some(&value) = whole.next() {
        graph.results.push(("last".into(), value));
    }
    graph
}

fn ty() -> TensorType {
    TensorType::new(DType::F32, &[32, 32])
}

fn node(graph: &mut Graph, values: &mut Vec<Value>, section: Section, choices: &mut Choices) {
    // Recent values are read more often.
    let recent = |choices: &mut Choices| {
        let reach = if choices.below(3) == 0 { values.len() } else { values.len().min(6) };
        values[values.len() - 1 - choices.below(reach)]
    };
    let value = recent(choices);
    let sharding = graph.sharding(value).clone();
    let alike: Vec<Value> =
        values.iter().rev().copied().filter(|&it| *graph.sharding(it) == sharding).collect();
    let other = alike[choices.below(alike.len().min(4))];
    match choices.below(6) {
        0 | 1 => push(graph, values, section, Add {}.into(), &[value, other], &[sharding]),
        2 if sharding.partial.is_none() => {
            push(graph, values, section, Mul {}.into(), &[value, other], &[sharding]);
        }
        2 | 3 => push(graph, values, section, ZerosLike {}.into(), &[value], &[sharding]),
        _ => {
            let to = LAYOUTS[choices.below(LAYOUTS.len())];
            let to = Sharding::parse(to, &graph.mesh).expect("a layout");
            let (cost, ty) = (CommCost::default(), ty());
            let steps = placement::reshard(&sharding, &to, &ty.shape, 4, &graph.mesh, &cost);
            // Two parts where there is a second value.
            let mut parts = vec![value, other];
            parts.dedup();
            for step in steps.expect("all layouts can be reached") {
                let op =
                    Collective { kind: CollectiveKind::from(step.kind), axes: step.kind.axes() };
                let shardings = vec![step.to; parts.len()];
                push(graph, values, section, op.into(), &parts, &shardings);
                parts = values[values.len() - parts.len()..].to_vec();
            }
        }
    }
}

fn push(
    graph: &mut Graph,
    values: &mut Vec<Value>,
    section: Section,
    op: Op,
    inputs: &[Value],
    shardings: &[Sharding],
) {
    let at = graph.order.len();
    let results: Vec<_> = (0..shardings.len()).map(|it| (format!("v{at}.{it}"), ty())).collect();
    let scope = graph.scopes.keys().next().expect("a root scope");
    let node = graph.add_node(NewNode { op, inputs, results: &results, section, scope });
    graph.order.push(node);
    for (&result, sharding) in graph.nodes[node].results.clone().iter().zip(shardings) {
        graph.values[result].sharding = Some(sharding.clone());
        values.push(result);
    }
}

fn stores(graph: &mut Graph, values: &[Value], choices: &mut Choices) {
    let states =
        values.iter().filter(|&&it| matches!(graph.values[it].def, Def::State | Def::Param));
    for state in states.copied().collect::<Vec<_>>() {
        for section in SECTIONS {
            let fits = |it: &&Value| {
                graph.sharding(**it) == graph.sharding(state) && graph.section(**it) <= section
            };
            let fitting: Vec<Value> = values.iter().rev().filter(fits).copied().collect();
            if choices.below(3) == 0 && !fitting.is_empty() {
                let value = fitting[choices.below(fitting.len())];
                graph.stores.push(Store { state, value, section });
            }
        }
    }
}
