//! [`Pass`] and [`PassManager`]: run, time, dump, and verify.

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
    #[error(
        "internal error: {} broke {} invariant(s): {}",
        one_of(.passes),
        .broken.len(),
        .broken.join("; ")
    )]
    Broke {
        /// The passes since the program was last verified, of which one broke it.
        passes: Vec<&'static str>,
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

/// Prints names as "`cse`, `dce` or `fuse`".
fn one_of(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|it| format!("`{it}`")).collect();
    match quoted.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => quoted.concat(),
    }
}

/// The passes after which a [`PassManager`] verifies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Verification {
    /// After every pass, so that an error names the pass.
    #[default]
    EveryPass,
    /// After each pass that ends a phase, so that an error names the passes of the phase. All passes of a phase must
    /// keep the same promises.
    EveryPhase,
    /// After no pass, for programs that never run or are verified elsewhere.
    Never,
}

impl Verification {
    /// Returns true if the program is verified after a pass that takes and leaves these phases.
    fn is_due(self, (before, after): (Phase, Phase)) -> bool {
        match self {
            Verification::EveryPass => true,
            Verification::EveryPhase => before != after,
            Verification::Never => false,
        }
    }
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
    /// The passes since the program was last verified.
    pub unverified: Vec<&'static str>,
}

impl PassManager {
    /// Runs `passes` on `ir`.
    ///
    /// # Panics
    /// If a pass is at the wrong place in the pipeline.
    pub fn run<I: Ir>(&mut self, ir: &mut I, passes: &[&dyn Pass<I>]) -> Result<(), PassError> {
        for pass in passes {
            let name = pass.name();
            let phases = pass.phases();
            assert_eq!(ir.phase(), phases.0, "`{name}` is at the wrong place in the pipeline");
            let start = Instant::now();
            pass.run(ir)?;
            self.finish(name, phases, ir, start)?;
        }
        Ok(())
    }

    /// Dumps, verifies and times what `pass`, begun at `start`, has made; for the step from a graph to a
    /// plan, which is no [`Pass`], too.
    pub fn finish(
        &mut self,
        pass: &'static str,
        phases: (Phase, Phase),
        ir: &impl Ir,
        start: Instant,
    ) -> Result<(), PassError> {
        self.unverified.push(pass);
        let due = self.verification.is_due(phases);
        let mut broken = if due { ir.verify() } else { Vec::new() };
        if ir.phase() != phases.1 {
            broken.push(format!("left phase {:?}, not {:?}", ir.phase(), phases.1));
        }
        self.times.push((pass, start.elapsed()));
        if self.dump_after.iter().any(|it| it == pass || it == "all") {
            self.dumps.push(Dump { pass, text: ir.text() });
        }
        if !broken.is_empty() {
            let passes = std::mem::take(&mut self.unverified);
            return Err(PassError::Broke { passes, broken });
        }
        if due {
            self.unverified.clear();
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A program in a phase; a pass may break it.
    struct Program(Phase, bool);

    impl Ir for Program {
        fn phase(&self) -> Phase {
            self.0
        }

        fn verify(&self) -> Vec<String> {
            if self.1 { vec!["it is broken".to_string()] } else { Vec::new() }
        }

        fn text(&self) -> String {
            String::new()
        }
    }

    /// A pass from one phase to another that breaks its program, or does not. It is none of the pipeline, whose passes
    /// `tests/tidy.rs` finds by `impl Pass`.
    struct Toy(&'static str, (Phase, Phase), bool);

    impl super::Pass<Program> for Toy {
        fn name(&self) -> &'static str {
            self.0
        }

        fn phases(&self) -> (Phase, Phase) {
            self.1
        }

        fn run(&self, ir: &mut Program) -> Result<(), PassError> {
            *ir = Program(self.1.1, ir.1 | self.2);
            Ok(())
        }
    }

    /// Compares the passes that are blamed where the third of four breaks the program.
    #[track_caller]
    fn check(verification: Verification, expect: &[&str]) {
        let (logical, sharded, explicit) = (Phase::Logical, Phase::Sharded, Phase::Explicit);
        let passes = [
            &Toy("a", (logical, sharded), false) as &dyn Pass<Program>,
            &Toy("b", (sharded, sharded), false),
            &Toy("c", (sharded, sharded), true),
            &Toy("d", (sharded, explicit), false),
        ];
        let mut manager = PassManager { verification, ..PassManager::default() };
        match manager.run(&mut Program(logical, false), &passes) {
            Ok(()) => assert_eq!(&[""; 0], expect),
            Err(PassError::Broke { passes, broken }) => {
                assert_eq!(passes, expect);
                assert_eq!(broken, ["it is broken"]);
            }
            Err(error @ PassError::Failed { .. }) => panic!("{error}"),
        }
    }

    #[test]
    fn an_error_names_the_passes_since_the_last_verification() {
        check(Verification::EveryPass, &["c"]);
        check(Verification::EveryPhase, &["b", "c", "d"]);
        check(Verification::Never, &[]);
        assert_eq!(one_of(&["b", "c", "d"]), "`b`, `c` or `d`");
        assert_eq!(one_of(&["c"]), "`c`");
    }
}
