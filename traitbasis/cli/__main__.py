from traitbasis.cli import main

main()
