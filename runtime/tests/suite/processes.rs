//! Ranks that meet over sockets and fail together: as threads with connections of their own, and as
//! processes of which one is killed. Their backend moves no data.

use std::net::TcpListener;
use std::ops::Range;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{scope, yield_now};
use std::time::Duration;

use ir::ops::CollectiveKind;
use ir::plan::{Buffer, Comm, Event, Plan, PlanSection, Role, Stream};
use ir::{DType, TensorType, ops::Fill};
use kernels::Proved;
use runtime::bind::{At, CollectiveCall, ComputeCall, CopyCall};
use runtime::comm::control::frame::Limits;
use runtime::comm::control::{Control, Wish};
use runtime::exec::{Backend, MemoryUse, Span};
use runtime::launch::{Hosted, Master, Process, Waits, plan_fact};
use runtime::session::MakeBackend;
use runtime::{Batch, RunError, Session, SessionOptions};

use crate::build::{PlanBuilder, mesh};

/// Runs nothing; in a collective it waits until all ranks have come, or one has failed.
struct Fake {
    control: Arc<dyn Control>,
    /// How many ranks came to the collective, over all steps.
    arrived: Arc<AtomicUsize>,
    steps: usize,
    /// Called when this rank comes to the collective.
    event: Arc<dyn Fn(u64) -> Result<(), RunError> + Send + Sync>,
    at: Option<At>,
}

impl Backend for Fake {
    fn begin(&mut self, _: PlanSection) -> Result<(), RunError> {
        Ok(())
    }
    fn compute(&mut self, _: &Arc<ComputeCall>, _: Stream) -> Result<(), RunError> {
        Ok(())
    }
    fn collective(&mut self, call: &Arc<CollectiveCall>, _: Stream) -> Result<(), RunError> {
        self.at = Some(call.at);
        (self.event)(self.control.rank())?;
        self.steps += 1;
        self.arrived.fetch_add(1, Ordering::SeqCst);
        let all = self.steps * self.control.n_ranks() as usize;
        while self.arrived.load(Ordering::SeqCst) < all {
            if self.control.fault().is_some() {
                return Err(RunError::Stopped);
            }
            yield_now();
        }
        Ok(())
    }
    fn copy(&mut self, _: CopyCall, _: Stream) -> Result<(), RunError> {
        Ok(())
    }
    fn record(&mut self, _: Event, _: Stream) -> Result<(), RunError> {
        Ok(())
    }
    fn wait(&mut self, _: Event, _: Stream) -> Result<(), RunError> {
        Ok(())
    }
    fn finish(&mut self) -> Result<(), RunError> {
        self.at = None;
        Ok(())
    }
    fn write_at(&mut self, _: Buffer, _: usize, _: &[u8]) -> Result<(), RunError> {
        Ok(())
    }
    fn keep(&mut self, _: &[Range<usize>]) -> Result<(), RunError> {
        Ok(())
    }
    fn restore(&mut self) -> Result<(), RunError> {
        Ok(())
    }
    /// 1.5 everywhere.
    fn read_at(&self, _: Buffer, _: usize, bytes: &mut [u8]) -> Result<(), RunError> {
        bytes.copy_from_slice(&1.5f32.to_le_bytes().repeat(bytes.len() / 4));
        Ok(())
    }
    fn broadcast(&mut self, _: Buffer, _: Comm, _: usize) -> Result<(), RunError> {
        Ok(())
    }
    fn at(&self) -> Option<At> {
        self.at
    }
    fn keep_times(&mut self, _: bool) -> Result<(), RunError> {
        Ok(())
    }
    fn times(&mut self) -> Result<Vec<Span>, RunError> {
        Ok(Vec::new())
    }
    fn memory(&self) -> Result<MemoryUse, RunError> {
        Ok(MemoryUse::default())
    }
}

/// One all-gather over all ranks, and a result.
fn plan(ranks: &str) -> Plan {
    let mut builder = PlanBuilder::new(mesh(ranks));
    let ty = TensorType::new(DType::F32, &[8]);
    let x = builder.buffer("x", Role::Temp, DType::F32, &[8], "[dp]");
    let y = builder.buffer("y", Role::Temp, DType::F32, &[8], "[_]");
    builder.buffer("w", Role::State, DType::F32, &[8], "[dp]");
    let loss = builder.buffer("loss", Role::State, DType::F32, &[], "[]");
    builder.plan.results.push(("loss".to_string(), loss));
    let comm = builder.comm(&["dp"]);
    builder.compute(Fill::new(1.0, &ty), &[], &[x]);
    builder.collective(CollectiveKind::AllGather, comm, &[(x, y)]);
    builder.plan
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("bound").port()
}

fn process(rank: u64, world_size: u64, port: u16) -> Process {
    let master = Master { host: "127.0.0.1".to_string(), ports: vec![port], ..Master::default() };
    Process { by: "the test", rank, world_size, local_rank: rank as u32, master }
}

type EventHook = Arc<dyn Fn(u64) -> Result<(), RunError> + Send + Sync>;

/// Meets as one rank and starts its session.
fn start(plan: &Plan, process: &Process, make: Arc<MakeBackend>) -> Result<Session, RunError> {
    let waits = Waits { meeting: Duration::from_secs(60), answer: Duration::from_secs(60) };
    let terms = (waits, Limits::of(plan));
    let hosted = Hosted::process(process, vec![plan_fact(plan)], terms, Ok(()))?;
    Session::with_backends(
        &Proved::unproved(plan.clone()),
        &SessionOptions::default(),
        hosted,
        make,
    )
}

fn fakes(event: EventHook) -> Arc<MakeBackend> {
    let arrived = Arc::new(AtomicUsize::new(0));
    Arc::new(move |_, _, rank| {
        let (control, arrived, event) = (rank.control.clone(), arrived.clone(), event.clone());
        Ok(Box::new(Fake { control, arrived, steps: 0, event, at: None }))
    })
}

/// Runs steps on all ranks, each with connections of its own, and returns what they end with.
fn run(ranks: u64, steps: u64, event: EventHook) -> Vec<Result<Option<f32>, RunError>> {
    let (plan, port, make) = (plan(&ranks.to_string()), free_port(), fakes(event));
    let body = |rank: u64| {
        let session = start(&plan, &process(rank, ranks, port), make.clone())?;
        let mut loss = None;
        for step in 1..=steps {
            loss = session.step(&Batch::default(), 0.1, step)?.loss;
        }
        Ok(loss)
    };
    scope(|scope| {
        let ranks: Vec<_> = (0..ranks).map(|it| scope.spawn(move || body(it))).collect();
        ranks.into_iter().map(|it| it.join().expect("no panic")).collect()
    })
}

#[test]
fn every_process_has_the_results() {
    let all = run(4, 3, Arc::new(|_| Ok(())));
    assert_eq!(all, vec![Ok(Some(1.5)); 4]);
}

/// Whichever process a signal comes to, and whenever: all ranks act on it after the same step.
#[test]
fn all_processes_act_on_a_signal_after_one_step() {
    // Each wish: the rank that has it, the step after which it comes, and what it is.
    let (save, stop) = (Wish::Save, Wish::Stop(15));
    let cases: [&[(u64, u64, Wish)]; 6] = [
        &[(0, 1, stop)],
        &[(2, 5, stop)],
        &[(3, 1, stop), (1, 1, Wish::Stop(2)), (0, 2, stop), (2, 3, stop)],
        &[(0, 4, save), (0, 9, stop)],
        &[(1, 4, save), (3, 4, save), (2, 400, save), (1, 800, stop)],
        &[(0, 3, save), (1, 3, stop), (0, 4, save), (2, 4, save)],
    ];
    for wishes in cases {
        let (plan, port, make) = (plan("4"), free_port(), fakes(Arc::new(|_| Ok(()))));
        let body = |rank: u64| {
            let session = start(&plan, &process(rank, 4, port), make.clone()).expect("they meet");
            let mut done = Vec::new();
            for step in 1.. {
                session.step(&Batch::default(), 0.1, step).expect("it runs");
                let wish = wishes.iter().find(|it| (it.0, it.1) == (rank, step)).map(|it| it.2);
                let Some(agreed) = session.agree(step, wish).expect("they agree") else { continue };
                done.push((step, agreed));
                if matches!(agreed, Wish::Stop(_)) {
                    break;
                }
            }
            done
        };
        let all: Vec<_> = scope(|scope| {
            let body = &body;
            let ranks: Vec<_> = (0..4).map(|it| scope.spawn(move || body(it))).collect();
            ranks.into_iter().map(|it| it.join().expect("no panic")).collect()
        });
        assert!(all.iter().all(|it| it == &all[0]), "{wishes:?}: {all:?}");
        // One step later if it comes to rank 0, and later still from elsewhere.
        let first = wishes.iter().map(|it| it.1).min().expect("a wish");
        assert!(all[0][0].0 > first, "{wishes:?}: {all:?}");
        if let [(0, at, wish)] = wishes {
            assert_eq!(all[0], [(at + 1, *wish)]);
        }
    }
}

#[test]
fn a_rank_that_fails_ends_all_processes() {
    let times = AtomicUsize::new(0);
    let event = move |rank: u64| {
        let bad = rank == 2 && times.fetch_add(1, Ordering::SeqCst) == 1;
        let error = RunError::NotExact { buffer: "ids".to_string(), value: 1 << 25 };
        if bad { Err(error) } else { Ok(()) }
    };
    let message = "rank 2 (dp=2), step[1] `all_gather(dp)` making `y`: `ids` holds 33554432";
    for error in run(4, 5, Arc::new(event)) {
        let error = error.expect_err("all end");
        assert_eq!(error.code(), "PL0508");
        assert!(error.to_string().starts_with(message), "{error}");
    }
}

/// Of ranks that wait for one that does not come, rank 0 says where each was.
#[test]
fn a_stall_says_where_all_ranks_were() {
    let waiting = AtomicUsize::new(0);
    let event = move |rank: u64| match rank {
        1 => {
            while waiting.load(Ordering::SeqCst) < 2 {
                yield_now();
            }
            let (seconds, section, streams) = (600, PlanSection::Step, Vec::new());
            Err(RunError::Stuck { seconds, section, streams })
        }
        _ => {
            waiting.fetch_add(1, Ordering::SeqCst);
            Ok(())
        }
    };
    let mut all = run(3, 1, Arc::new(event));
    let error = all.remove(0).expect_err("all end");
    assert_eq!(error.code(), "PL0551");
    let end = "; when it ended: ranks 0-2 at step[1] `all_gather(dp)` making `y`";
    assert!(error.to_string().ends_with(end), "{error}");
    for error in all {
        let error = error.expect_err("all end").to_string();
        assert!(error.starts_with("rank 1 (dp=1), step[1]") && !error.contains(end), "{error}");
    }
}

/// What is outside of instructions ends all as well.
#[test]
fn a_failure_outside_of_instructions_ends_all_processes() {
    let (plan, port, make) = (plan("2"), free_port(), fakes(Arc::new(|_| Ok(()))));
    let errors = scope(|scope| {
        let body = |rank: u64| {
            // The other may fail before this one has started.
            let session = match start(&plan, &process(rank, 2, port), make.clone()) {
                Ok(session) => session,
                Err(error) => return error,
            };
            if rank == 1 {
                let why = "no space left on device".to_string();
                let error = RunError::Io { doing: "write", path: "metrics".into(), why };
                return session.fail(error);
            }
            session.step(&Batch::default(), 0.1, 1).expect_err("the other has failed")
        };
        let ranks: Vec<_> = (0..2).map(|it| scope.spawn(move || body(it))).collect();
        ranks.into_iter().map(|it| it.join().expect("no panic")).collect::<Vec<RunError>>()
    });
    for error in errors {
        assert_eq!(error.code(), "PL0520");
        assert!(error.to_string().contains("cannot write `metrics`: no space left"), "{error}");
    }
}

#[test]
fn a_global_tensor_is_not_in_one_process() {
    let (plan, port, make) = (plan("2"), free_port(), fakes(Arc::new(|_| Ok(()))));
    scope(|scope| {
        for rank in 0..2 {
            let (plan, make) = (&plan, make.clone());
            scope.spawn(move || {
                let session = start(plan, &process(rank, 2, port), make).expect("they meet");
                let error = session.read("w").expect_err("a shard is elsewhere");
                let message = format!(
                    "`w` is spread over processes, and this one has rank {rank} only; use one process"
                );
                assert_eq!((error.code(), error.to_string()), ("PL0566", message));
                // What all hold can be read anywhere, and nothing has ended.
                assert_eq!(session.read("loss").expect("all have it").data, [1.5]);
            });
        }
    });
}

/// The address of rank 0, for the process of the next test.
const PORT: &str = "PLANC_TEST_PORT";

/// Rank 1 of the next test, when that starts this binary again.
#[test]
fn child() {
    let Ok(port) = std::env::var(PORT) else { return };
    let port = port.parse().expect("a port");
    let make = fakes(Arc::new(|_| Ok(())));
    let session = start(&plan("2"), &process(1, 2, port), make).expect("they meet");
    // Rank 0 is in another process, and does not come to this collective.
    let _ = session.step(&Batch::default(), 0.1, 1);
}

#[test]
fn a_process_that_is_killed_is_noticed() {
    let port = free_port();
    let child = Command::new(std::env::current_exe().expect("a test"))
        .args(["--exact", "processes::child"])
        .env(PORT, port.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let child = Arc::new(Mutex::new(child));
    let killed = child.clone();
    let kill = move |_| {
        let mut child = killed.lock().expect("no panic");
        child.kill().and_then(|()| child.wait()).expect("it runs");
        Ok(())
    };
    let make = fakes(Arc::new(kill));
    let session = start(&plan("2"), &process(0, 2, port), make).expect("they meet");
    let error = session.step(&Batch::default(), 0.1, 1).expect_err("rank 1 is gone");
    assert_eq!(error.code(), "PL0565");
    let message = error.to_string();
    assert!(
        message.starts_with("rank 1 (") && message.contains("ended without a word"),
        "{message}"
    );
}
