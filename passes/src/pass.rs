//! [`Pass`] and [`PassManager`]: run, time, dump, and verify always.

use std::fmt;
use std::time::{Duration, Instant};

use ir::Phase;
use ir::verify::{self, VerifyError};

/// What passes transform: a graph or a plan.
pub trait Ir {
    /// How far the program has come.
    fn phase(&self) -> Phase;
    /// Every broken invariant of its phase.
    fn verify(&self) -> Vec<String>;
    /// Its text form.
    fn text(&self) -> String;
}

/// A function from one program to the next.
pub trait Pass<I: Ir> {
    /// Kebab-case; what `--dump-ir-after`, `--passes` and the filetests call it.
    fn name(&self) -> &'static str;
    /// The phase it takes and the one it leaves.
    fn phases(&self) -> (Phase, Phase);
    /// Transforms `ir`. An error is the user's: the model cannot be compiled as it is.
    fn run(&self, ir: &mut I) -> Result<(), PassError>;
}

/// Why a pass did not finish.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// The user's model cannot be compiled.
    #[error("{message}")]
    Failed {
        /// Stable code, for `planc explain`.
        code: &'static str,
        /// What is wrong with which tensor, and what would fix it.
        message: String,
        /// Value or module at fault, for a report that points into `model.ron`.
        subject: Option<String>,
    },
    /// A pass left a program that breaks its promises: our bug.
    #[error("internal error: `{pass}` broke {} invariant(s): {}", .broken.len(), .broken.join("; "))]
    Broke {
        /// The pass.
        pass: &'static str,
        /// All broken invariants.
        broken: Vec<String>,
    },
}

/// Text of a program after a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dump {
    /// The pass.
    pub pass: &'static str,
    /// The program.
    pub text: String,
}

/// The passes after which a [`PassManager`] verifies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Verification {
    /// After every pass. A program that runs is verified.
    #[default]
    EveryPass,
    /// After no pass, for programs that never run.
    Never,
}

/// Runs passes in order.
#[derive(Debug, Default)]
pub struct PassManager {
    /// The passes after which it verifies.
    pub verification: Verification,
    /// Passes to dump after: names, or `all`.
    pub dump_after: Vec<String>,
    /// What was dumped.
    pub dumps: Vec<Dump>,
    /// Time of each pass, with its verification.
    pub times: Vec<(&'static str, Duration)>,
}

impl PassManager {
    /// Runs `passes` on `ir`.
    ///
    /// # Panics
    /// If a pass is at the wrong place in the pipeline.
    pub fn run<I: Ir>(&mut self, ir: &mut I, passes: &[&dyn Pass<I>]) -> Result<(), PassError> {
        for pass in passes {
            let name = pass.name();
            let (before, after) = pass.phases();
            assert_eq!(ir.phase(), before, "`{name}` is at the wrong place in the pipeline");
            let start = Instant::now();
            pass.run(ir)?;
            self.finish(name, after, ir, start)?;
        }
        Ok(())
    }

    /// Dumps, verifies and times what `pass`, begun at `start`, has made; for the step from a graph to a
    /// plan, which is no [`Pass`], too.
    pub fn finish(
        &mut self,
        pass: &'static str,
        phase: Phase,
        ir: &impl Ir,
        start: Instant,
    ) -> Result<(), PassError> {
        let mut broken = match self.verification {
            Verification::EveryPass => ir.verify(),
            Verification::Never => Vec::new(),
        };
        if ir.phase() != phase {
            broken.push(format!("left phase {:?}, not {phase:?}", ir.phase()));
        }
        self.times.push((pass, start.elapsed()));
        if self.dump_after.iter().any(|it| it == pass || it == "all") {
            self.dumps.push(Dump { pass, text: ir.text() });
        }
        if !broken.is_empty() {
            return Err(PassError::Broke { pass, broken });
        }
        Ok(())
    }
}

impl fmt::Display for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "; after {}\n{}", self.pass, self.text)
    }
}

impl Ir for ir::Graph {
    fn phase(&self) -> Phase {
        self.phase
    }

    fn verify(&self) -> Vec<String> {
        texts(verify::graph::verify(self))
    }

    fn text(&self) -> String {
        ir::text::print_graph(self)
    }
}

impl Ir for ir::plan::Plan {
    fn phase(&self) -> Phase {
        self.phase
    }

    fn verify(&self) -> Vec<String> {
        texts(verify::plan::verify(self))
    }

    fn text(&self) -> String {
        ir::text::print_plan(self)
    }
}

fn texts(errors: Vec<VerifyError>) -> Vec<String> {
    errors.into_iter().map(|it| it.to_string()).collect()
}
