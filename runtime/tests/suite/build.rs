//! Plans by hand: every buffer has memory of its own.

use std::path::PathBuf;

use cranelift_entity::PrimaryMap;
use ir::graph::Init;
use ir::ops::CollectiveKind;
use ir::placement::{Mesh, Sharding};
use ir::plan::{
    Arena, Buffer, BufferData, Comm, Event, Instruction, Part, Plan, PlanParam, PlanSection, Role,
    Stream, StreamKind,
};
use ir::run::Run;
use ir::{DType, Op, Phase, TensorType};
use kernels::Proved;
use runtime::{Session, SessionOptions};

pub struct PlanBuilder {
    pub plan: Plan,
    /// Where instructions go.
    pub section: PlanSection,
    pub stream: Stream,
}

/// `"2x4"` has axes `dp` and `tp`, `"2x2x2"` has `rep`, `dp` and `tp`, `"4"` has `dp`.
pub fn mesh(text: &str) -> Mesh {
    let sizes: Vec<u32> = text.split('x').map(|it| it.parse().expect("a size")).collect();
    let names: &[&str] = match sizes.len() {
        1 => &["dp"],
        2 => &["dp", "tp"],
        _ => &["rep", "dp", "tp"],
    };
    let axes: Vec<(&str, u32)> = names.iter().copied().zip(sizes).collect();
    Mesh::new(&axes)
}

/// A file of this test, in cargo's folder for such.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, bytes).expect("the folder is writable");
    path
}

pub fn session(plan: &Plan) -> Session {
    session_with_order(plan, 0)
}

pub fn session_with_order(plan: &Plan, order_seed: u64) -> Session {
    let options = SessionOptions { order_seed, check: true, ..SessionOptions::default() };
    Session::new(&Proved::unproved(plan.clone()), &options).unwrap_or_else(|it| panic!("{it}"))
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|it| it.to_bits()).collect()
}

impl PlanBuilder {
    pub fn new(mesh: Mesh) -> PlanBuilder {
        let mut streams = PrimaryMap::new();
        let stream = streams.push(StreamKind::Compute.into());
        let plan = Plan {
            name: "test".to_string(),
            mesh,
            phase: Phase::Planned,
            micro_batches: 1,
            comms: PrimaryMap::new(),
            streams,
            events: 0,
            buffers: PrimaryMap::new(),
            sections: Default::default(),
            persistent_bytes: 0,
            model: None,
            step_bytes: 0,
            params: Vec::new(),
            results: Vec::new(),
            run: Run::default(),
        };
        PlanBuilder { plan, section: PlanSection::Step, stream }
    }

    pub fn buffer(
        &mut self,
        name: &str,
        role: Role,
        dtype: DType,
        shape: &[u64],
        sharding: &str,
    ) -> Buffer {
        let sharding = Sharding::parse(sharding, &self.plan.mesh).expect("a sharding");
        self.buffer_at(name, role, TensorType::new(dtype, shape), sharding)
    }

    pub fn buffer_at(
        &mut self,
        name: &str,
        role: Role,
        ty: TensorType,
        sharding: Sharding,
    ) -> Buffer {
        let data = BufferData { name: name.to_string(), ty, sharding, role, offset: None };
        let buffer = self.plan.buffers.push(data);
        let bytes = self.plan.local_bytes(buffer).next_multiple_of(8);
        let arena = match role.arena() {
            Arena::Persistent => &mut self.plan.persistent_bytes,
            Arena::Step => &mut self.plan.step_bytes,
        };
        let offset = Some(*arena);
        *arena += bytes;
        self.plan.buffers[buffer].offset = offset;
        buffer
    }

    /// An f32 parameter.
    pub fn param(&mut self, name: &str, shape: &[u64], sharding: &str, init: Init) -> Buffer {
        let buffer = self.buffer(name, Role::Param, DType::F32, shape, sharding);
        self.plan.params.push(PlanParam { buffer, label: None, init, aliases: Vec::new() });
        buffer
    }

    pub fn event(&mut self) -> Event {
        self.plan.events += 1;
        Event::from_u32(self.plan.events - 1)
    }

    pub fn push(&mut self, instruction: Instruction) {
        self.plan.sections[self.section as usize].push(instruction);
    }

    pub fn compute(&mut self, op: impl Into<Op>, args: &[Buffer], results: &[Buffer]) {
        let (args, results) = (args.iter().copied().collect(), results.iter().copied().collect());
        self.push(Instruction::Compute { op: op.into(), args, results, stream: self.stream });
    }

    pub fn comm(&mut self, axes: &[&str]) -> Comm {
        let axes = self.plan.mesh.axis_set(axes).expect("axes");
        self.plan.comms.push(axes)
    }

    pub fn collective(&mut self, kind: CollectiveKind, comm: Comm, parts: &[(Buffer, Buffer)]) {
        let parts = parts.iter().map(|&(src, dst)| Part { src, dst, adds: false }).collect();
        self.push(Instruction::Collective { kind, comm, parts, stream: self.stream });
    }

    pub fn copy(&mut self, src: Buffer, dst: Buffer) {
        self.push(Instruction::Copy { src, dst, stream: self.stream });
    }

    pub fn record(&mut self, event: Event) {
        self.push(Instruction::Record { event, stream: self.stream });
    }

    pub fn wait(&mut self, event: Event) {
        self.push(Instruction::Wait { event, stream: self.stream });
    }

    /// A state of which rank `r` holds rows `r * n .. (r + 1) * n`, of the local shape of `like`: what
    /// each rank has in `like`, padding included, to be read and written.
    pub fn by_rank(&mut self, name: &str, like: Buffer) -> Buffer {
        let mut shape = self.plan.local_shape(like);
        shape[0] *= self.plan.mesh.n_ranks();
        let axes: Vec<&str> = self.plan.mesh.axes.iter().map(|it| it.name.as_str()).collect();
        let mut dims = vec!["_"; shape.len()];
        let all = axes.join(".");
        dims[0] = &all;
        let sharding = format!("[{}]", dims.join(", "));
        let dtype = self.plan.buffers[like].ty.dtype;
        self.buffer(name, Role::State, dtype, &shape, &sharding)
    }
}
