//! What is legal in a plan and probably not meant.

use ir::graph::Move;
use ir::placement::AxisSet;
use ir::plan::Plan;
use serde::Serialize;

/// What to look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Lint {
    /// A weight whose shards are of different sizes, so that some ranks hold padding.
    Uneven,
    /// A weight of which some ranks hold nothing.
    EmptyShards,
    /// A weight that is sharded outside `weight_mesh`: the scale of its quantized form would differ
    /// between parts of one tensor.
    SplitScale,
    /// A weight or a batch of data that is moved, although the model says where it lives.
    Moved,
}

/// A lint and the tensors that it is about.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// The lint.
    pub lint: Lint,
    /// Names of tensors.
    pub tensors: Vec<String>,
}

impl Lint {
    const OF_PARAMS: [Lint; 3] = [Lint::Uneven, Lint::EmptyShards, Lint::SplitScale];

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Lint::Uneven => "uneven",
            Lint::EmptyShards => "empty-shards",
            Lint::SplitScale => "split-scale",
            Lint::Moved => "moved",
        }
    }

    /// What is the matter with its tensors.
    pub fn what(self) -> &'static str {
        match self {
            Lint::Uneven => "have shards of different sizes, padded to the largest",
            Lint::EmptyShards => "have ranks that hold nothing of them",
            Lint::SplitScale => "are sharded over axes outside `weight_mesh`",
            Lint::Moved => "are moved in every step, although the model places them",
        }
    }

    fn finds(self, plan: &Plan, buffer: ir::plan::Buffer) -> bool {
        let (data, mesh) = (&plan.buffers[buffer], &plan.mesh);
        match self {
            Lint::Uneven => !data.sharding.divides(&data.ty.shape, mesh),
            // Pieces are cut from the front, so whoever is last on every axis holds the least.
            Lint::EmptyShards => {
                let last: Vec<u32> = mesh.axes.iter().map(|it| it.size - 1).collect();
                data.sharding.extents(&data.ty.shape, mesh, &last).contains(&0)
            }
            Lint::SplitScale => {
                let outside: AxisSet = data.sharding.sharded_axes().minus(plan.weight_mesh);
                data.ty.ndim() >= 2 && !outside.is_empty()
            }
            Lint::Moved => false,
        }
    }
}

/// What there is to say about a plan, and about the moves that were chosen for it.
pub fn findings(plan: &Plan, moves: &[Move]) -> Vec<Finding> {
    let tensors = |lint: Lint| -> Vec<String> {
        let found = plan.params.iter().filter(|it| lint.finds(plan, it.buffer));
        found.map(|it| plan.buffers[it.buffer].name.clone()).collect()
    };
    let of_params = Lint::OF_PARAMS.into_iter();
    let of_params = of_params.map(|lint| Finding { lint, tensors: tensors(lint) });
    let moved = moves.iter().filter(|it| it.placed).map(|it| it.value.clone()).collect();
    let all = of_params.chain([Finding { lint: Lint::Moved, tensors: moved }]);
    all.filter(|it| !it.tensors.is_empty()).collect()
}

impl Finding {
    /// ``uneven: 5 weights (`a`, `b` and 3 more) have shards of different sizes``.
    pub fn text(&self) -> String {
        let shown: Vec<String> = self.tensors.iter().take(2).map(|it| format!("`{it}`")).collect();
        let more = match self.tensors.len() - shown.len() {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        format!("{}: {}{more} {}", self.lint.name(), shown.join(", "), self.lint.what())
    }
}
