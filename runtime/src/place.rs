//! [`Place`]: the device of a plan, the CPU or GPUs, and the ranks of it that this process runs.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use ir::plan::Plan;
use kernels::Proved;

use crate::backend::compare::{CompareBackend, Comparison};
use crate::backend::cuda::driver::{self, Device as Gpu};
use crate::backend::cuda::{CudaBackend, CudaOptions};
use crate::comm::control::frame::Limits;
use crate::comm::nccl::{CommOptions, Comms};
use crate::error::RunError;
use crate::exec::Backend;
use crate::launch::{Hosted, Launch, Waits, plan_fact};
use crate::session::{MakeBackend, Session, SessionOptions, check_ranks, cpu_backends};

/// What runs instructions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Device {
    /// A thread or a process per rank.
    #[default]
    Cpu,
    /// An NVIDIA GPU per rank.
    Cuda,
}

/// See the [module docs](self).
#[derive(Debug, Clone)]
pub struct Place {
    /// On what.
    pub device: Device,
    /// Which ranks are here.
    pub launch: Launch,
    /// How long ranks wait for each other: to meet, and for anything to move afterwards.
    pub timeout: Option<Duration>,
    /// Compares every instruction with the CPU's, and says how they differ.
    pub compare: Option<Sender<Comparison>>,
}

impl Default for Place {
    fn default() -> Place {
        Place { device: Device::Cpu, launch: Launch::Threads, timeout: None, compare: None }
    }
}

/// How long ranks wait for each other to start.
const MEETING: Duration = Duration::from_secs(300);

/// The longest that they do, whatever is asked for: clocks end.
const MEETING_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

impl Place {
    /// The ranks of a plan that this process runs, once they have met all others. `options` are those
    /// that must be the same on all, by name.
    pub fn host(&self, plan: &Plan, options: &[(&str, u64)]) -> Result<Hosted, RunError> {
        match &self.launch {
            Launch::Threads => {
                self.check_device()?;
                Ok(Hosted::threads(check_ranks(plan)?))
            }
            Launch::Process(process) => {
                let own = [
                    ("PLANC_NCCL_WINDOWS", u64::from(self.comm_options().windows)),
                    ("--device cuda", u64::from(self.device == Device::Cuda)),
                    ("--compare cpu", u64::from(self.compare.is_some())),
                ];
                let options = options.iter().chain(&own);
                let options = options.map(|(name, it)| (name.to_string(), it.to_string()));
                let facts = std::iter::once(plan_fact(plan)).chain(options).collect();
                let own = self.launch.check(plan).and_then(|()| self.check_device());
                let (answer, own) = match own.and_then(|()| self.stall()) {
                    Ok(answer) => (answer, Ok(())),
                    Err(error) => (MEETING, Err(error)),
                };
                let waits = Waits { meeting: self.meeting(), answer };
                Hosted::process(process, facts, (waits, Limits::of(plan)), own)
            }
        }
    }

    /// Tells the other ranks, if they are other processes, that this one has no plan to run.
    pub fn tell(&self, error: RunError) {
        match &self.launch {
            Launch::Process(it) if it.world_size > 1 => Hosted::tell(it, error),
            Launch::Process(_) | Launch::Threads => (),
        }
    }

    /// Checks that this machine has the device that runs instructions.
    fn check_device(&self) -> Result<(), RunError> {
        match self.device {
            Device::Cpu => Ok(()),
            Device::Cuda => driver::initialize(),
        }
    }

    /// The time for which nothing may move before a rank ends the run.
    fn stall(&self) -> Result<Duration, RunError> {
        self.timeout.map_or_else(|| Ok(CudaOptions::from_env()?.timeout), Ok)
    }

    fn meeting(&self) -> Duration {
        self.timeout.unwrap_or(MEETING).min(MEETING_MAX)
    }

    fn comm_options(&self) -> CommOptions {
        CommOptions::from_env(self.meeting())
    }

    /// Starts those ranks.
    pub fn start(
        &self,
        plan: &Proved,
        options: &SessionOptions,
        hosted: Hosted,
    ) -> Result<Session, RunError> {
        let cuda = self.cuda();
        let make: Arc<MakeBackend> = match (self.device, &self.compare) {
            (Device::Cpu, _) => return Session::start(plan, options, hosted),
            (Device::Cuda, None) => cuda,
            (Device::Cuda, Some(report)) => {
                let (cpu, report) = (cpu_backends(plan, options, &hosted), report.clone());
                Arc::new(move |plan, bound, rank| {
                    let backends = [cuda(plan, bound, rank)?, cpu(plan, bound, rank)?];
                    let params = plan.params.iter().map(|it| it.buffer).collect();
                    let (bound, report) = (bound.clone(), report.clone());
                    let both: Box<dyn Backend> =
                        Box::new(CompareBackend::new(bound, params, backends, report));
                    Ok(both)
                })
            }
        };
        Session::with_backends(plan, options, hosted, make)
    }

    fn cuda(&self) -> Arc<MakeBackend> {
        let timeout = self.timeout;
        let meeting = self.comm_options();
        Arc::new(move |plan, bound, rank| {
            let mut options = CudaOptions::from_env()?;
            options.timeout = timeout.unwrap_or(options.timeout);
            let gpu = Gpu::open(rank.gpu(driver::n_devices()?))?;
            let control = rank.control.clone();
            let comms = Comms::new(plan, bound, &control, meeting)?;
            let backend = CudaBackend::new(plan, bound.clone(), gpu, comms, control, options)?;
            let backend: Box<dyn Backend> = Box::new(backend);
            Ok(backend)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_timeout_beyond_what_clocks_count_is_a_long_one() {
        let place = Place { timeout: Some(Duration::MAX), ..Place::default() };
        assert!(Instant::now().checked_add(place.meeting()).is_some());
    }
}
