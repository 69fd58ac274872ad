//! Two ranks with a connection between them: what they get, how long they wait, and what they refuse.

use std::net::TcpListener;
use std::thread::scope;

use cranelift_entity::{EntityRef, PrimaryMap};
use ir::DType;
use ir::plan::{Arena, Role};

use super::*;
use crate::bind::BoundBuffer;
use crate::comm::control::frame::{Frames, Limits, Sender as End};

/// A plan with a buffer of three bytes.
fn plan() -> Arc<BoundPlan> {
    let mut buffers = PrimaryMap::new();
    buffers.push(BoundBuffer {
        name: "x".to_string(),
        dtype: DType::E4M3,
        shape: [3].as_slice().into(),
        extents: [3].as_slice().into(),
        len: 3,
        role: Role::State,
        arena: Arena::Persistent,
        offset: 0,
    });
    Arc::new(BoundPlan {
        rank: 0,
        coord: Default::default(),
        buffers,
        groups: PrimaryMap::new(),
        sections: Default::default(),
        streams: 1,
        events: 0,
        arenas: [3, 0],
    })
}

/// Both ends of one connection.
fn connection() -> [TcpStream; 2] {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let address = listener.local_addr().expect("it is bound");
    let one = TcpStream::connect(address).expect("it listens");
    [one, listener.accept().expect("one has come").0]
}

/// One end, which seals with the key `out` and gets frames under `key`.
fn link(stream: TcpStream, out: u8, key: u8) -> Link {
    let seal = |it: u8| Seal::new([it; 32]);
    Link { stream, out: seal(out), frames: Frames::new(seal(key), End::First, Limits { data: 0 }) }
}

/// The wires of two ranks, each with a fault of its own.
fn pair(patience: Duration) -> [(Wire, Fault); 2] {
    let [a, b] = connection();
    let wire = |links: Vec<Option<Link>>| {
        let fault = Fault::default();
        (Wire::new(&plan(), links, patience, &fault).expect("threads"), fault)
    };
    [wire(vec![None, Some(link(a, 1, 2))]), wire(vec![Some(link(b, 2, 1)), None])]
}

const LONG: Duration = Duration::from_secs(60);

fn group(index: usize) -> Group {
    Group { members: vec![0, 1], index, id: 0 }
}

fn instruction(index: usize) -> Occasion {
    Occasion::Instruction(At { section: PlanSection::Step, index })
}

fn post(parts: &[&[u8]]) -> Post {
    let part = |it: &&[u8]| {
        let mut bytes = Bytes::default();
        bytes.assign(it);
        bytes
    };
    Arc::new(parts.iter().map(part).collect())
}

fn exchange(
    wire: &mut Wire,
    index: usize,
    occasion: Occasion,
    post: Post,
) -> Result<Posts, RunError> {
    wire.exchange(Comm::new(0), &group(index), occasion, post)
}

fn all(posts: &Posts) -> Vec<Vec<&[u8]>> {
    posts.iter().map(|it| it.iter().map(Bytes::all).collect()).collect()
}

/// More than any buffer of a connection holds, in both directions at once, and then very little.
#[test]
fn ranks_get_what_all_gave_in_order_of_members() {
    let (large, small) = (vec![7; 32 << 20], vec![9; 32 << 20]);
    let [(mut a, _), (mut b, _)] = pair(LONG);
    scope(|scope| {
        let other = scope.spawn(|| {
            let first = exchange(&mut b, 1, instruction(0), post(&[&small, b"x"]));
            (first, exchange(&mut b, 1, instruction(1), post(&[])))
        });
        let first = exchange(&mut a, 0, instruction(0), post(&[&large, b"y"])).expect("it comes");
        let second = exchange(&mut a, 0, instruction(1), post(&[])).expect("it comes");
        let (theirs, last) = other.join().expect("no panic");
        let expect: Vec<Vec<&[u8]>> = vec![vec![&large, b"y"], vec![&small, b"x"]];
        assert!(all(&first) == expect && all(&theirs.expect("it comes")) == expect);
        assert_eq!(
            [all(&second), all(&last.expect("it comes"))].concat(),
            vec![Vec::<&[u8]>::new(); 4]
        );
    });
}

/// Only one member has something to give.
#[test]
fn a_broadcast_gives_what_the_root_has() {
    let [(mut a, _), (mut b, _)] = pair(LONG);
    let occasion = Occasion::Broadcast { buffer: Buffer::new(0), root: 1 };
    scope(|scope| {
        let other = scope.spawn(|| exchange(&mut b, 1, occasion, post(&[b"abc"])).map(|_| ()));
        let posts = exchange(&mut a, 0, occasion, post(&[b""])).expect("it comes");
        assert_eq!(all(&posts), [[&b""[..]], [b"abc"]]);
        assert_eq!(other.join().expect("no panic"), Ok(()));
    });
}

#[test]
fn ranks_at_different_collectives_are_told() {
    let [(mut a, _), (mut b, _)] = pair(LONG);
    scope(|scope| {
        let other = scope.spawn(|| exchange(&mut b, 1, instruction(4), post(&[b"b"])).map(|_| ()));
        let error = exchange(&mut a, 0, instruction(3), post(&[b"a"])).map(|_| ());
        let diverged = |ours: &str, theirs: &str| {
            Err(RunError::Diverged { ours: ours.to_string(), theirs: theirs.to_string() })
        };
        assert_eq!(error, diverged("step[3]", "step[4]"));
        assert_eq!(other.join().expect("no panic"), diverged("step[4]", "step[3]"));
    });
}

/// A rank that waits hears of a failure at once, and of a rank that says nothing after its patience.
#[test]
fn a_failure_or_silence_ends_a_wait() {
    let [(mut a, fault), b] = pair(LONG);
    scope(|scope| {
        let waiting =
            scope.spawn(|| exchange(&mut a, 0, instruction(0), post(&[b"a"])).map(|_| ()));
        fault.raise(RunError::NoDriver);
        assert_eq!(waiting.join().expect("no panic"), Err(RunError::Stopped));
    });
    drop(b);
    let [(mut a, _), _b] = pair(Duration::from_millis(20));
    let silent = exchange(&mut a, 0, instruction(0), post(&[b"a"])).map(|_| ());
    assert_eq!(silent.expect_err("nothing comes").code(), "PL0551");
    let occasion = Occasion::Broadcast { buffer: Buffer::new(0), root: 1 };
    let [(mut a, _), _b] = pair(Duration::from_millis(20));
    let silent = exchange(&mut a, 0, occasion, post(&[b""])).map(|_| ());
    assert_eq!(silent.expect_err("nothing comes").code(), "PL0565");
}

/// Data that was changed on its way, or that another rank than the one that proved itself sends.
#[test]
fn data_that_is_not_of_the_other_rank_is_refused() {
    let good = {
        let mut seal = Seal::new([2; 32]);
        let head = instruction(0).to_bytes();
        let tag = seal.mac().chain_update(head).chain_update(b"abc").finalize().into_bytes();
        [&head[..], b"abc", &tag].concat()
    };
    for flipped in [None, Some(0), Some(HEAD), Some(HEAD + 2), Some(good.len() - 1)] {
        let [ours, mut theirs] = connection();
        let fault = Fault::default();
        let links = vec![None, Some(link(ours, 1, 2))];
        let mut wire = Wire::new(&plan(), links, LONG, &fault).expect("threads");
        let mut bytes = good.clone();
        flipped.iter().for_each(|&it| bytes[it] ^= 0x80);
        theirs.write_all(&bytes).expect("it is open");
        // Nobody else finds out why, so that the run need not be given time to say.
        wire.failed = channel().1;
        let found = exchange(&mut wire, 0, instruction(0), post(&[b"xyz"]));
        match flipped {
            None => assert_eq!(all(&found.expect("it is good")), [[b"xyz"], [b"abc"]]),
            Some(_) => assert_eq!(found.map(|_| ()).expect_err("it is not").code(), "PL0565"),
        }
    }
}
