//! Which ranks this process runs, and on which GPU.
//!
//! From flags, else from torchrun's variables, else from those of a Slurm step of several tasks; without
//! any, all ranks are threads of this process and rank `i` has GPU `i`. A set that is given in part is an
//! error, since a guess would leave ranks waiting for each other.

pub mod rendezvous;
pub mod secret;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ir::Digest;
use ir::model::axes_text;
use ir::plan::Plan;

use self::rendezvous::pairs::Pairs;
use self::rendezvous::{Meeting, meet};
use self::secret::Secret;
use crate::comm::control::frame::Limits;
use crate::comm::control::tcp::Pulse;
use crate::comm::control::threads::threads;
use crate::comm::control::{Control, Fault};
use crate::error::RunError;

/// The flags that say which rank this is, where rank 0 listens, and who it lets in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LaunchFlags {
    /// This process's rank.
    pub rank: Option<u64>,
    /// How many ranks there are.
    pub world_size: Option<u64>,
    /// Number among the ranks on this machine.
    pub local_rank: Option<u32>,
    /// The address of rank 0: `host:port`.
    pub master: Option<String>,
    /// The address that rank 0 listens on, if the master's is none of its machine's.
    pub listen: Option<String>,
    /// The file that has the secret of the job.
    pub secret_file: Option<PathBuf>,
}

/// How the ranks of a run are spread over processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Launch {
    /// All are threads of this process.
    Threads,
    /// This process is one of them.
    Process(Process),
}

/// One rank, which is this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Who says so: `torchrun`.
    pub by: &'static str,
    /// The rank.
    pub rank: u64,
    /// How many there are.
    pub world_size: u64,
    /// Number among the ranks on this machine.
    pub local_rank: u32,
    /// Where the ranks meet.
    pub master: Master,
}

/// The address of rank 0, and the knowledge that a rank must prove there.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Master {
    /// A name or address.
    pub host: String,
    /// Ports, of which rank 0 takes the first that is free and the others try all.
    pub ports: Vec<u16>,
    /// What tells this run from others that may be on these ports; empty if nothing does.
    pub job: String,
    /// All ranks run on one machine.
    pub one_machine: bool,
    /// The address that rank 0 listens on, if not on the master's.
    pub listen: Option<String>,
    /// The secret that only the ranks of this run know.
    pub secret: Option<Secret>,
}

/// The times that ranks wait for each other.
#[derive(Debug, Clone, Copy)]
pub struct Waits {
    /// To meet.
    pub meeting: Duration,
    /// For what rank 0 sends to all later.
    pub answer: Duration,
}

/// The ranks that run in this process, each with its connection to all others.
pub struct Hosted {
    /// Raised when a rank fails, here or elsewhere.
    pub fault: Arc<Fault>,
    /// In rank order; one at least.
    pub ranks: Vec<HostedRank>,
}

/// One of them.
#[derive(Clone)]
pub struct HostedRank {
    /// Which rank.
    pub rank: u64,
    /// Number among the ranks on this machine: the GPU, if it has one of its own.
    pub local_rank: u32,
    /// The way to ranks in other processes; none if all are threads of this one.
    pub pairs: Option<Arc<Pairs>>,
    /// Its connection.
    pub control: Arc<dyn Control>,
}

/// A look at the environment: the value of a variable.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

const FLAGS: [&str; 4] = ["--rank", "--world-size", "--local-rank", "--master"];
const TORCHRUN: [&str; 5] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"];
const SLURM: [&str; 4] = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NODELIST"];

/// How many ports ranks try that share theirs with a launcher or with other jobs.
const PORTS: u16 = 8;

impl Launch {
    /// What `flags` and the environment say.
    pub fn detect(flags: &LaunchFlags, env: Env) -> Result<Launch, RunError> {
        let set = |name: &str| env(name).filter(|it| !it.trim().is_empty());
        let given = [
            flags.rank.is_some(),
            flags.world_size.is_some(),
            flags.local_rank.is_some(),
            flags.master.is_some(),
        ];
        let mut process = if given.contains(&true) {
            by_flags(flags, given)?
        } else if ["RANK", "WORLD_SIZE", "LOCAL_RANK"].iter().any(|it| set(it).is_some()) {
            by_torchrun(&set)?
        } else if slurm_step(&set)? {
            by_slurm(&set)?
        } else {
            return Ok(Launch::Threads);
        };
        process.check()?;
        process.master.listen = flags.listen.clone();
        process.master.secret = Secret::find(flags.secret_file.as_deref(), &set)?;
        Ok(Launch::Process(process))
    }

    /// Warnings for the user of rank 0 about the address it listens on, and about who is let in.
    pub fn warnings(&self) -> Vec<String> {
        match self {
            Launch::Process(it) if it.rank == 0 && it.world_size > 1 => it.master.warnings(),
            Launch::Process(_) | Launch::Threads => Vec::new(),
        }
    }

    /// Whether rank 0 runs in this process, which is the one that reports.
    pub fn is_first(&self) -> bool {
        match self {
            Launch::Threads => true,
            Launch::Process(it) => it.rank == 0,
        }
    }

    /// Whether there are as many ranks as the plan's mesh has.
    pub fn check(&self, plan: &Plan) -> Result<(), RunError> {
        let Launch::Process(process) = self else { return Ok(()) };
        let sizes = plan.mesh.axes.iter().map(|it| u64::from(it.size));
        let ranks = sizes.fold(1u64, u64::saturating_mul);
        if ranks == process.world_size {
            return Ok(());
        }
        Err(RunError::WorldSize {
            by: process.by,
            world_size: process.world_size,
            mesh: axes_text(plan.mesh.user_axes(), ", "),
            ranks,
        })
    }
}

impl Hosted {
    /// All ranks, as threads.
    pub fn threads(n_ranks: u64) -> Hosted {
        let fault = Arc::new(Fault::default());
        let ends = threads(n_ranks, &fault).into_iter();
        let ranks = ends.map(|control| HostedRank {
            rank: control.rank(),
            local_rank: control.rank() as u32,
            pairs: None,
            control,
        });
        Hosted { ranks: ranks.collect(), fault }
    }

    /// This process's rank, once it has met all others. `facts` must be the same on all. If this rank's `own`
    /// checks have failed, it meets the others only to tell them, and all end with that error.
    pub fn process(
        process: &Process,
        facts: Vec<(String, String)>,
        (waits, limits): (Waits, Limits),
        own: Result<(), RunError>,
    ) -> Result<Hosted, RunError> {
        let fault = Arc::new(Fault::default());
        let pulse = Pulse { answer: waits.answer, ..Pulse::default() };
        let mut timeout = waits.meeting;
        if let Err(error) = own {
            fault.raise(error);
            timeout = timeout.min(pulse.linger);
        }
        let meeting = Meeting {
            rank: process.rank,
            world_size: process.world_size,
            master: &process.master,
            facts,
            timeout,
            pulse,
            limits,
        };
        let met = meet(&meeting, &fault);
        // Who could not tell the others still ends with its own error.
        let control = fault.get().map_or(met, Err)?;
        let pairs = Some(Arc::new(Pairs::new(control.clone(), meeting.key())));
        let Process { rank, local_rank, .. } = *process;
        let ranks = vec![HostedRank { rank, local_rank, pairs, control }];
        Ok(Hosted { fault, ranks })
    }

    /// Tells the other ranks of an error of this one, which therefore does not know what they run.
    pub fn tell(process: &Process, error: RunError) {
        let waits = Waits { meeting: Pulse::default().linger, answer: Duration::ZERO };
        // It ends with that error anyway, whether the others hear of it or not.
        let _ = Hosted::process(process, Vec::new(), (waits, Limits { data: 0 }), Err(error));
    }

    /// Whether rank 0, which reports, is here.
    pub fn is_first(&self) -> bool {
        self.ranks[0].rank == 0
    }

    /// Ends all ranks with `error`, if none has failed before; returns what they end with.
    pub fn fail(&self, error: RunError) -> RunError {
        self.ranks[0].control.fail(error.clone());
        self.fault.get().unwrap_or(error)
    }
}

impl HostedRank {
    /// Returns true if all ranks are threads of this process.
    pub fn is_thread(&self) -> bool {
        self.pairs.is_none()
    }

    /// The GPU, of those that this process sees: that of its number on this machine, or the only one,
    /// since Slurm may show each task its own GPU only.
    pub fn gpu(&self, visible: u32) -> u32 {
        if visible == 1 && !self.is_thread() { 0 } else { self.local_rank }
    }
}

impl fmt::Debug for Hosted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.ranks.iter().map(|it| it.rank)).finish()
    }
}

/// A plan as ranks compare it.
pub fn plan_fact(plan: &Plan) -> (String, String) {
    ("plan".to_string(), Digest::of_plan(plan).to_string())
}

impl Process {
    fn check(&self) -> Result<(), RunError> {
        let (rank_name, size_name) = match self.by {
            "torchrun" => ("RANK", "WORLD_SIZE"),
            "Slurm" => ("SLURM_PROCID", "SLURM_NTASKS"),
            _ => ("--rank", "--world-size"),
        };
        if self.world_size == 0 {
            return Err(bad(size_name, "0", "leaves no rank to run"));
        }
        if self.rank >= self.world_size {
            let why = format!("is not below {size_name} = {}; ranks count from 0", self.world_size);
            return Err(bad(rank_name, &self.rank.to_string(), why));
        }
        Ok(())
    }
}

fn by_flags(flags: &LaunchFlags, given: [bool; 4]) -> Result<Process, RunError> {
    let (Some(rank), Some(world_size), Some(local_rank), Some(master)) =
        (flags.rank, flags.world_size, flags.local_rank, &flags.master)
    else {
        return Err(missing("the command line", &FLAGS, |i| given[i]));
    };
    let form = "is not host:port; give it as node1:29500 or [fd00::1]:29500";
    let (host, number) = master.rsplit_once(':').ok_or_else(|| bad("--master", master, form))?;
    let bare = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
    let host = bare.unwrap_or(host);
    if host.is_empty() || (bare.is_none() && host.contains(':')) {
        return Err(bad("--master", master, form));
    }
    let ports = vec![port("--master", number)?];
    let master = Master { host: host.to_string(), ports, ..Master::default() };
    Ok(Process { by: "the command line", rank, world_size, local_rank, master })
}

fn by_torchrun(env: Env) -> Result<Process, RunError> {
    let values = TORCHRUN.map(env);
    let [Some(rank), Some(size), Some(local), Some(host), Some(master_port)] = values.clone()
    else {
        return Err(missing("torchrun", &TORCHRUN, |i| values[i].is_some()));
    };
    let given = port("MASTER_PORT", &master_port)?;
    // torchrun's agent may hold MASTER_PORT itself, with its own store.
    let agent = env("TORCHELASTIC_RUN_ID");
    let ports = match agent {
        Some(_) => ports_after(given),
        None => vec![given],
    };
    let restart = env("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
    let job = agent.map_or(String::new(), |id| format!("torchrun {id}.{restart} on {given}"));
    let one_machine = env("LOCAL_WORLD_SIZE").is_some_and(|it| it.trim() == size.trim());
    let host = host.trim().to_string();
    Ok(Process {
        by: "torchrun",
        rank: number("RANK", &rank)?,
        world_size: number("WORLD_SIZE", &size)?,
        local_rank: number("LOCAL_RANK", &local)?,
        master: Master { host, ports, job, one_machine, ..Master::default() },
    })
}

/// The tasks of the step, else those of the job.
fn slurm_tasks(env: Env) -> Option<String> {
    env("SLURM_STEP_NUM_TASKS").or_else(|| env("SLURM_NTASKS"))
}

/// Whether this is one of several tasks of Slurm. A single one, as of `srun --pty bash`, has all ranks.
fn slurm_step(env: Env) -> Result<bool, RunError> {
    let Some(tasks) = slurm_tasks(env) else {
        return Ok(env("SLURM_PROCID").is_some() && env("SLURM_STEP_ID").is_some());
    };
    Ok(number::<u64>("SLURM_NTASKS", &tasks)? > 1 && env("SLURM_PROCID").is_some())
}

fn by_slurm(env: Env) -> Result<Process, RunError> {
    let nodes = env("SLURM_STEP_NODELIST").or_else(|| env("SLURM_JOB_NODELIST"));
    let values = [env("SLURM_PROCID"), slurm_tasks(env), env("SLURM_LOCALID"), nodes];
    let [Some(rank), Some(size), Some(local), Some(nodes)] = values.clone() else {
        return Err(missing("Slurm", &SLURM, |i| values[i].is_some()));
    };
    let host = match env("MASTER_ADDR") {
        Some(host) => host.trim().to_string(),
        None => first_host(&nodes).ok_or_else(|| {
            bad("SLURM_JOB_NODELIST", &nodes, "is no list of nodes; set MASTER_ADDR to the first")
        })?,
    };
    let job = env("SLURM_JOB_ID").or_else(|| env("SLURM_JOBID"));
    let ports = match (env("MASTER_PORT"), &job) {
        (Some(it), _) => vec![port("MASTER_PORT", &it)?],
        (None, Some(job)) => {
            let id: u64 = number("SLURM_JOB_ID", job)?;
            // Above the well-known and below the ephemeral ones; the next if another job has it.
            let base = 15000 + (id % 10000) as u16;
            (base..base + PORTS).collect()
        }
        (None, None) => {
            let missing = vec!["SLURM_JOB_ID or MASTER_PORT"];
            return Err(RunError::LaunchMissing { by: "Slurm", missing, all: SLURM.to_vec() });
        }
    };
    let step = env("SLURM_STEP_ID").unwrap_or_default();
    let job = job.map_or(String::new(), |it| format!("Slurm {it}.{step}"));
    let nodes = env("SLURM_STEP_NUM_NODES").or_else(|| env("SLURM_JOB_NUM_NODES"));
    let one_machine = nodes.is_some_and(|it| it.trim() == "1");
    Ok(Process {
        by: "Slurm",
        rank: number("SLURM_PROCID", &rank)?,
        world_size: number("SLURM_NTASKS", &size)?,
        local_rank: number("SLURM_LOCALID", &local)?,
        master: Master { host, ports, job, one_machine, ..Master::default() },
    })
}

/// The ports after one that a launcher may hold; those below it where there are none above.
fn ports_after(port: u16) -> Vec<u16> {
    let offsets = 1..=PORTS;
    match port.checked_add(PORTS) {
        Some(_) => offsets.map(|it| port + it).collect(),
        None => offsets.map(|it| port - it).collect(),
    }
}

/// The first of a list of nodes as Slurm writes it.
///
/// ```text
/// node[003-005,9],login1  ->  node003
/// rack[1-2]n[07-08]-ib    ->  rack1n07-ib
/// ```
fn first_host(list: &str) -> Option<String> {
    let (mut res, mut rest) = (String::new(), list.trim());
    while let Some(at) = rest.find(['[', ',', ']']) {
        res.push_str(&rest[..at]);
        match rest.as_bytes()[at] {
            b'[' => {
                let (numbers, after) = rest[at + 1..].split_once(']')?;
                let first = numbers.split(['-', ',']).next()?;
                if first.is_empty() || !first.bytes().all(|it| it.is_ascii_digit()) {
                    return None;
                }
                res.push_str(first);
                rest = after;
            }
            b',' => {
                rest = "";
                break;
            }
            _ => return None,
        }
    }
    res.push_str(rest);
    let is_name = |it: char| it.is_ascii_alphanumeric() || "-._:".contains(it);
    (!res.is_empty() && res.chars().all(is_name)).then_some(res)
}

fn missing(by: &'static str, all: &[&'static str], given: impl Fn(usize) -> bool) -> RunError {
    let absent = all.iter().enumerate().filter(|it| !given(it.0)).map(|it| *it.1);
    RunError::LaunchMissing { by, missing: absent.collect(), all: all.to_vec() }
}

fn bad(name: &'static str, value: &str, why: impl Into<String>) -> RunError {
    RunError::LaunchValue { name, value: value.to_string(), why: why.into() }
}

fn number<T: std::str::FromStr>(name: &'static str, text: &str) -> Result<T, RunError> {
    text.trim().parse().map_err(|_| bad(name, text, "is not a whole number from 0 on"))
}

fn port(name: &'static str, text: &str) -> Result<u16, RunError> {
    match text.trim().parse() {
        Ok(0) | Err(_) => Err(bad(name, text, "is no port; ports are 1 to 65535")),
        Ok(it) => Ok(it),
    }
}

#[cfg(test)]
mod tests;
