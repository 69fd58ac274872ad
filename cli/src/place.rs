//! Flags that say where to run, for `run` and `bench`.

use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::time::Duration;

use codegen::Proved;
use runtime::backend::compare::Comparison;
use runtime::launch::{Launch, LaunchFlags};
use runtime::{Place, RunError};

use crate::controls::clean;
use crate::input::PlanArgs;
use crate::report::{Outcome, Ui, print_aside, warning};

/// Where to run.
///
/// Without flags, ranks are what torchrun or several tasks of Slurm say, else threads of this process,
/// one for each rank of the mesh, with GPU i for rank i.
#[derive(Debug, clap::Args)]
pub struct PlaceArgs {
    /// What runs the ranks.
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
    /// This process's rank; goes before torchrun's and Slurm's variables.
    #[arg(long, value_name = "RANK", requires_all = ["world_size", "local_rank", "master"])]
    rank: Option<u64>,
    /// How many ranks there are.
    #[arg(long, value_name = "N", requires = "rank")]
    world_size: Option<u64>,
    /// Number among the ranks of this machine, and of its GPU.
    #[arg(long, value_name = "N", requires = "rank")]
    local_rank: Option<u32>,
    /// Where rank 0 is reached, and listens if the address is one of its machine's.
    #[arg(long, value_name = "HOST:PORT", requires = "rank")]
    master: Option<String>,
    /// The address that rank 0 listens on, where the master's is a service's; 0.0.0.0 is all.
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
    /// A file with a secret that only the processes of this run know; else PLANC_JOB_SECRET_FILE or PLANC_JOB_SECRET.
    #[arg(long, value_name = "FILE")]
    job_secret_file: Option<PathBuf>,
    /// How long ranks wait for each other; by default 300 s to meet and 600 s for a step to move.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    timeout: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Device {
    /// A thread or a process per rank.
    Cpu,
    /// An NVIDIA GPU per rank.
    Cuda,
}

impl PlaceArgs {
    /// What the flags and the environment say.
    pub fn place(&self, compare: Option<Sender<Comparison>>, ui: &Ui) -> Result<Place, RunError> {
        let flags = LaunchFlags {
            rank: self.rank,
            world_size: self.world_size,
            local_rank: self.local_rank,
            master: self.master.clone(),
            listen: self.listen.clone(),
            secret_file: self.job_secret_file.clone(),
        };
        let launch = Launch::detect(&flags, &|name| std::env::var(name).ok())?;
        launch.warnings().iter().for_each(|it| print_aside(&warning(ui, None, &clean(it))));
        Ok(Place {
            device: match self.device {
                Device::Cpu => runtime::Device::Cpu,
                Device::Cuda => runtime::Device::Cuda,
            },
            launch,
            timeout: self.timeout.map(Duration::from_secs),
            compare,
        })
    }

    /// Whether it is GPUs.
    pub fn is_cuda(&self) -> bool {
        self.device == Device::Cuda
    }
}

/// The plan to run. A rank that has none tells the others, which wait for it.
pub fn plan(args: &PlanArgs, place: &Place, ui: &Ui) -> Outcome<Proved> {
    told(args.plan(ui), place)
}

/// The outcome of what this process does before ranks meet; the others, which wait for it, are told of an error.
pub fn told<T>(outcome: Outcome<T>, place: &Place) -> Outcome<T> {
    outcome.inspect_err(|it| {
        let (code, message, bug) = (it.code, it.message.clone(), it.is_bug);
        place.tell(RunError::NoPlan { code, message, bug });
    })
}
