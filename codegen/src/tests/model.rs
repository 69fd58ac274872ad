//! A stack of residual MLPs, FSDP and tensor parallel.

use ir::graph::{AfterForward, Def, Init, Param, ScopeData, Store};
use ir::ops::{
    Activation, ActivationKind, Add, Cast, CeLoss, CeMax, CeStats, Matmul, Reshard, RmsNorm,
};
use ir::placement::{Mesh, Sharding};
use ir::run::Run;
use ir::{Builder, DType, Graph, Section, TensorType, Value};

/// Sizes of a model.
#[derive(Clone, Copy)]
pub(crate) struct Mlp {
    pub layers: u32,
    pub hidden: u64,
    pub tokens: u64,
    pub vocab: u64,
    pub micro_batches: u32,
}

pub(crate) const SMALL: Mlp =
    Mlp { layers: 3, hidden: 64, tokens: 32, vocab: 128, micro_batches: 1 };

/// Weights are bf16, kept as f32, sharded over tp and then dp; tokens over dp and, between layers, tp.
pub(crate) fn mlp(sizes: Mlp, mesh: Mesh) -> Graph {
    let mut graph = Graph::new("mlp", mesh);
    graph.micro_batches = sizes.micro_batches;
    let mut model = Model { builder: Builder::new(&mut graph) };
    let Mlp { layers, hidden, tokens, vocab, .. } = sizes;
    let mut x = model.input("x", TensorType::new(DType::Bf16, &[tokens, hidden]), "[dp.tp, _]");
    let labels = model.input("labels", TensorType::new(DType::I32, &[tokens]), "[dp]");
    for layer in 0..layers {
        model.scope(&format!("layers.{layer}"), layer + 1);
        let norm = model.weight("norm", &[hidden], "[dp]", "[_]");
        let up = model.weight("up", &[4 * hidden, hidden], "[tp.dp, _]", "[tp, _]");
        let down = model.weight("down", &[hidden, 4 * hidden], "[dp, tp]", "[_, tp]");
        let eps = 1e-5.into();
        let op = RmsNorm { eps, ..RmsNorm::default() };
        let h = model.ops(&["h", "rstd"], op.into(), &[x, norm])[0];
        let fprop = Matmul { transpose_b: true, ..Matmul::default() };
        let h = model.ops(&["up.out"], fprop.clone().into(), &[h, up])[0];
        let act = Activation::new(ActivationKind::Silu);
        let h = model.ops(&["act"], act.into(), &[h])[0];
        let h = model.ops(&["down.out"], fprop.into(), &[h, down])[0];
        let h = model.ops(&["down.sum"], Reshard::default().into(), &[h])[0];
        model.pin(h, "[dp.tp, _]");
        x = model.ops(&["x"], Add {}.into(), &[x, h])[0];
    }
    model.scope("head", 0);
    let head = model.weight("weight", &[vocab, hidden], "[tp.dp, _]", "[tp, _]");
    let fprop = Matmul { transpose_b: true, ..Matmul::default() };
    let logits = model.ops(&["logits"], fprop.into(), &[x, head])[0];
    let m = model.ops(&["max"], CeMax {}.into(), &[logits])[0];
    let stats = model.ops(&["sumexp", "target"], CeStats::default().into(), &[logits, labels, m]);
    let loss = CeLoss { ignore_index: -100 }.into();
    let loss = model.ops(&["loss_sum", "loss_count"], loss, &[m, stats[0], stats[1], labels]);
    let sections = graph.nodes.clone();
    graph.order.sort_by_key(|&it| sections[it].section);
    let global_batch = tokens * u64::from(sizes.micro_batches);
    graph.run = Run { global_batch, vocab, ..Run::default() };
    graph.results = vec![("loss_sum".into(), loss[0]), ("loss_count".into(), loss[1])];
    graph
}

struct Model<'a> {
    builder: Builder<'a>,
}

impl Model<'_> {
    fn scope(&mut self, path: &str, unit: u32) {
        let after_forward = AfterForward::Drop;
        let data = ScopeData { path: path.into(), unit, after_forward, ..ScopeData::default() };
        self.builder.scope = self.builder.graph.scopes.push(data);
    }

    fn path(&self, name: &str) -> String {
        let path = &self.builder.graph.scopes[self.builder.scope].path;
        if path.is_empty() { name.to_string() } else { format!("{path}.{name}") }
    }

    fn pin(&mut self, value: Value, sharding: &str) {
        let sharding = Sharding::parse(sharding, &self.builder.graph.mesh).expect("a sharding");
        self.builder.pin(value, sharding);
    }

    fn ops(&mut self, names: &[&str], op: ir::Op, inputs: &[Value]) -> Vec<Value> {
        let names: Vec<String> = names.iter().map(|it| self.path(it)).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.builder.ops(&names, op, inputs).expect("it fits").to_vec()
    }

    fn input(&mut self, name: &str, ty: TensorType, sharding: &str) -> Value {
        let value = self.builder.leaf(name, ty, Def::Input);
        self.pin(value, sharding);
        value
    }

    fn weight(&mut self, name: &str, shape: &[u64], storage: &str, full: &str) -> Value {
        let name = self.path(name);
        let master = TensorType::new(DType::F32, shape);
        let value = self.builder.leaf(&name, master.clone(), Def::Param);
        self.pin(value, storage);
        let ty = master.with_dtype(DType::Bf16);
        let compute = self.builder.leaf(&format!("{name}.compute"), ty, Def::State);
        self.pin(compute, storage);
        self.builder.section = Section::Prepare;
        let made = self.builder.op(&format!("{name}.bf16"), Cast { to: DType::Bf16 }, &[value]);
        let made = made.expect("it fits");
        self.pin(made, storage);
        let section = Section::Prepare;
        self.builder.graph.stores.push(Store { state: compute, value: made, section });
        self.builder.section = Section::Forward;
        let gather = Reshard { reduce: None };
        let whole = self.builder.op(&format!("{name}.full"), gather, &[compute]).expect("it fits");
        self.pin(whole, full);
        let scope = self.builder.scope;
        self.builder.graph.params.push(Param {
            value,
            compute,
            full: whole,
            label: None,
            init: Init::Zeros,
            decay: true,
            trainable: true,
            placed: false,
            reduce_dtype: DType::F32,
            scope,
            aliases: Vec::new(),
            grad: None,
        });
        whole
    }
}
